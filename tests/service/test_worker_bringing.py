"""An item whose adapter cannot be had at one worker: who serves it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from shoal.catalog.schema import Adapter, Entry
from shoal.clock import wall
from shoal.errors import ModelUnavailable, UnknownModel
from shoal.queue.interface import QueueLimits
from shoal.queue.memory import MemoryBroker, MemoryQueue
from shoal.wire.envelope import Envelope, ModelState, Status, encode
from shoal.worker import adapter_files
from shoal.worker.adapters import Adapters
from shoal.worker.bringing import Bringing
from shoal.worker.held import Held, HeldItem
from shoal.worker.peers import Peers
from tests.conftest import run, until
from tests.support.lora import write_adapter

ENTRY = Entry(id="m", tasks=["encode"], source="file:///w", runtime="null")
KEY = "m@a@1"


class Setting:
    """One worker's rooms over a queue in memory. most: adapters that its copies have at once."""

    def __init__(self, folder, source, *, most=1):
        self.queue = MemoryQueue(MemoryBroker(QueueLimits()))
        self.held = Held(self.queue, worker="w", ack_wait_s=60.0, max_attempts=3, inline_max=1000)
        self.peers = Peers("w")
        catalog = {KEY: Adapter(name="a", base="m", source=source)}
        self.adapters = Adapters(catalog.get, folder / "cache", lambda _: most)
        self.bringing = Bringing(self.held, self.adapters, self.peers)

    def hear(self, *, adapts=True, faulty=()):
        state = ModelState("m@1", "resident", adapts=adapts, faulty=list(faulty))
        self.peers.on_status(encode(Status("other", [state])))

    async def item(self, time_s=30.0):
        """An item in hand, pulled from the queue."""
        now_s = wall()
        envelope = Envelope(
            *("i", "r", 0, 1, "encode", "m", "1", "interactive", 1, 1, now_s + time_s, now_s, "in"),
            adapter=KEY,
        )
        line, got = ("m@1", "interactive"), []
        await self.queue.submit(
            *(*line, encode(envelope)), item_id="i", ttl_s=60.0, on_refused=got.append
        )
        item = HeldItem(await self.pull(), envelope, 0.0)
        assert self.held.add(item)
        return item

    async def pull(self):
        got = []
        await self.queue.pull(
            *("m@1", "interactive"),
            max_items=1,
            expires_s=60.0,
            on_delivery=got.append,
            on_end=lambda: None,
        )
        await until(lambda: got)
        return got[0]

    async def bring(self, item, key=KEY):
        return await self.bringing.bring(ENTRY, item, key)


@pytest.fixture
def here(tmp_path):
    return f"file://{write_adapter(tmp_path / 'adapter')}"


@pytest.mark.parametrize("why", ["runtime", "files"])
def test_bringing_leaves_an_item_to_a_worker_that_has_its_adapter(tmp_path, here, why):
    """Where the runtime takes none, or the files are elsewhere; that costs it no attempt."""

    async def main():
        elsewhere = f"file://{tmp_path}/none"
        it = Setting(tmp_path, here if why == "runtime" else elsewhere, most=int(why == "files"))
        item = await it.item()
        assert not it.bringing.is_near(ENTRY, KEY)
        it.hear()
        assert await it.bring(item) is None
        assert not it.held.has(item)
        assert (await it.pull()).attempt == item.delivery.attempt
        assert it.adapters.files.faulty("m") == ([KEY] if why == "files" else [])

    run(main())


def test_bringing_answers_where_nobody_can_have_an_adapter(tmp_path, here):
    """The caller gets the reason: nobody else is there, they lack it, or it is too late."""

    async def main():
        it = Setting(tmp_path, here, most=0)
        item = await it.item()
        assert "takes no adapters" in (await it.bring(item)).message
        for said in ({"adapts": False}, {"faulty": [KEY]}):
            it.hear(**said)
            assert isinstance(await it.bring(item), ModelUnavailable)
        it.hear()
        assert isinstance(await it.bring(late(item)), ModelUnavailable)
        assert it.held.has(item)

    def late(item):
        """The same, due before anybody could have it back."""
        return replace(item, envelope=structs.replace(item.envelope, deadline_s=wall() + 0.05))

    run(main())


def test_bringing_waits_for_files_and_tells_the_callers_faults(tmp_path, here, monkeypatch):
    """What is here is near from then on; one that nobody knows is not asked for elsewhere."""

    async def main():
        it = Setting(tmp_path, here)
        it.hear()
        item = await it.item()
        assert await it.bring(item) is None
        assert it.held.has(item)
        assert it.bringing.is_near(ENTRY, KEY)
        monkeypatch.setattr(adapter_files, "NEWS_S", 0.01)
        assert isinstance(await it.bring(item, "m@none@1"), UnknownModel)
        assert it.held.has(item)

    run(main())
