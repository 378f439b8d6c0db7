"""The worker's room of adapters over a real runtime process: waits, uses and bounds."""

from __future__ import annotations

import asyncio
import math
import threading
from contextlib import asynccontextmanager

import numpy as np
import pytest
from msgspec.structs import replace

from shoal.catalog.schema import Adapter, Entry, Output
from shoal.core.adapters import MAX_RESIDENT_ADAPTERS
from shoal.errors import (
    ModelLoading,
    ModelUnavailable,
    RuntimeCrashed,
    UnknownModel,
    WeightsMissing,
)
from shoal.ipc.facts import Adapts
from shoal.ipc.messages import AdapterSpec, ModelSpec, RunItem
from shoal.runtimes.null import numbers
from shoal.wire.envelope import decode_result
from shoal.worker import adapter_files, adapters
from shoal.worker.adapter_files import MAX_ADAPTER_FETCHES, MAX_AWAITING_ADAPTERS
from shoal.worker.adapters import Adapters
from shoal.worker.device import Device, Loaded
from shoal.worker.supervise import RuntimeProcess
from tests.conftest import run, until
from tests.support.lora import write_adapter

ENTRY = Entry(
    id="m",
    tasks=["encode"],
    source="file:///w",
    runtime="null",
    outputs={"dense": Output(8)},
    options={"max_adapters": 2},
)


def most(entry):
    return Adapts().most(entry.tasks, entry.source, entry.options)


class Setting:
    """A catalog of adapters, a device with a copy of the model, and a worker's room of adapters."""

    def __init__(self, folder, connection) -> None:
        self.folder = write_adapter(folder / "adapter")
        self.catalog: dict[str, Adapter] = {}
        self.device = Device("cpu#0")
        self.device.resident[ENTRY.key] = Loaded(ENTRY, 100, 0.0, 0.0)
        self.connection = connection
        self.room = Adapters(self.catalog.get, folder / "cache", most)

    def add(self, *names, source=None):
        for name in names:
            adapter = Adapter(name=name, base="m", source=source or f"file://{self.folder}")
            self.catalog[adapter.key] = adapter
        self.room.on_catalog([self.device])
        return [f"m@{name}@1" for name in names]

    async def run(self, *keys, entry=ENTRY):
        items = [
            RunItem(str(at), "encode", [3], texts=[f"text {at}"], adapter=key)
            for at, key in enumerate(keys)
        ]
        ran = await self.room.run(self.device, entry, self.connection, items, None)
        assert [each.item for each in ran.items] == [item.item for item in items]
        for item, done in zip(items, ran.items, strict=True):
            if done.failure is None:
                text = f"{item.adapter}|{item.texts[0]}" if item.adapter else item.texts[0]
                dense = decode_result(bytes(done.result)).arrays["dense"]
                np.testing.assert_array_equal(
                    np.frombuffer(dense.data, np.float32), numbers([text], 8)[0]
                )
        return [done.failure for done in ran.items]

    @property
    def here(self):
        return {state.adapter for state in self.room.states(ENTRY, [self.device])}


@pytest.fixture
def setting(tmp_path):
    """Opens a setting with a runtime process of its own."""

    @asynccontextmanager
    async def opened():
        process = RuntimeProcess("null", device="cpu#0", threads=1, on_lost=lambda: None)
        connection = await process.connection()
        spec = ModelSpec(ENTRY.key, "/w", str(tmp_path), ["encode"], outputs=["dense"])
        await connection.load(spec)
        made = Setting(tmp_path, connection)
        made.device.processes[ENTRY.process] = process
        yield made
        await made.room.close()
        await process.stop()

    return opened


def test_adapters_of_a_batch_run_each_with_its_own(setting):
    """More adapters than a copy has at once run in parts; the copy's size has what they take."""

    async def main():
        async with setting() as it:
            a, b, c, d = it.add("a", "b", "c", "d")
            assert await it.run(a, "", b, c, a, d, "", b) == [None] * 8
            assert len(it.here) == 2
            one = await it.connection.load_adapter(ENTRY.key, AdapterSpec(a, str(it.folder)))
            loaded = it.device.resident[ENTRY.key]
            assert loaded.size_bytes == 100 + 2 * one.memory_bytes
            assert await it.run(a, entry=replace(ENTRY, options={})) == [None]

    run(main())


def test_adapters_are_as_many_as_usual_unless_the_entry_says_otherwise(setting):
    """Without the option a copy keeps the usual number, and no more of however many."""

    async def main():
        async with setting() as it:
            keys = it.add(*(f"a{n}" for n in range(2 * MAX_RESIDENT_ADAPTERS)))
            plain = replace(ENTRY, options={})
            assert await it.run(*keys, entry=plain) == [None] * len(keys)
            assert len(it.here) == MAX_RESIDENT_ADAPTERS

    run(main())


def test_adapters_that_cannot_be_had_fail_their_own_items_only(setting):
    """Broken, not there, gone from the catalog: each says so, and the others' items are answered.

    What its runtime refused is not tried again at once.
    """

    async def main():
        async with setting() as it:
            (good,) = it.add("good")
            (absent,) = it.add("absent", source=f"file://{it.folder}/none")
            (broken,) = it.add("bad", source=f"file://{write_adapter(it.folder / 'broken')}")
            found = await it.run(good, absent, broken, "m@gone@1", "", good)
            codes = [failure and failure.code for failure in found]
            unavailable, missing = ModelUnavailable.code, WeightsMissing.code
            assert codes == [None, missing, unavailable, UnknownModel.code, None, None]
            assert f"{broken} is no adapter" in found[2].message
            assert found[2].retry_after_s > 0
            assert not it.room.files.is_near(broken)
            with pytest.raises(ModelUnavailable, match="is no adapter"):
                await it.room.files.fetch(broken)

    run(main())


def test_adapters_whose_file_has_changed_fail_their_own_items_only(setting):
    """A file that is not the one of its digest is refused, and its neighbours are answered."""

    async def main():
        async with setting() as it:
            (good,) = it.add("good")
            changed = Adapter(
                name="changed",
                base="m",
                source=f"file://{it.folder}",
                digests={"adapter_config.json": "0" * 64},
            )
            it.catalog[changed.key] = changed
            it.room.on_catalog([it.device])
            found = await it.run(good, changed.key, "", good)
            assert [failure and failure.code for failure in found] == [
                *(None, ModelUnavailable.code, None, None)
            ]
            assert "adapter_config.json" in found[1].message

    run(main())


def test_adapters_are_not_blamed_for_a_runtime_that_has_none(setting):
    """Until another runtime serves the model their items fail, and then they are tried at once."""

    async def main():
        async with setting() as it:
            (key,) = it.add("a")
            process = RuntimeProcess("onnx", device="cpu#0", threads=1, on_lost=lambda: None)
            able, it.connection = it.connection, await process.connection()
            (failure,) = await it.run(key)
            assert "takes no adapters" in failure.message
            await process.stop()
            it.connection = able
            assert await it.run(key) == [None]

    run(main())


def test_adapters_in_use_are_not_taken_away(setting):
    """A use that finds no room waits until another ends, and holds nobody up who needs none.

    One that is given up loads nothing, and nobody waits behind it.
    """

    async def main():
        async with setting() as it:
            a, b, c, d = it.add("a", "b", "c", "d")
            use = it.room._in_use
            async with use(it.device, ENTRY, it.connection, {a, b}):
                given_up = asyncio.create_task(it.run(d))
                third = asyncio.create_task(it.run(c))
                assert await it.run(a, b) == [None, None]
                await until(lambda: it.room._copies["cpu#0", ENTRY.key].short_since_s < math.inf)
                assert not third.done()
                assert it.here == {a, b}
                given_up.cancel()
                await asyncio.gather(given_up, return_exceptions=True)
            assert await third == [None]
            assert c in it.here
            assert d not in it.here
            async with use(it.device, ENTRY, it.connection, {b}):
                assert await it.run(c) == [None]
                assert it.here == {b, c}

    run(main())


def test_adapters_in_use_all_the_time_make_room_in_the_end(setting, monkeypatch):
    """Once somebody has waited for room for long enough, nobody goes ahead of them any more."""

    async def main():
        async with setting() as it:
            a, b, c = it.add("a", "b", "c")
            monkeypatch.setattr(adapters, "ROOM_S", 0.0)
            async with it.room._in_use(it.device, ENTRY, it.connection, {a, b}):
                third = asyncio.create_task(it.run(c))
                await until(lambda: it.room._copies["cpu#0", ENTRY.key].short_since_s < math.inf)
                behind = asyncio.create_task(it.run(a, b))
                await asyncio.wait([behind], timeout=0.05)
                assert not behind.done()
            assert await third == [None]
            assert await behind == [None, None]

    run(main())


def test_adapters_that_take_their_process_along_are_not_loaded_again_at_once(setting):
    """It fails its own items from then on; one that was to be loaded with it is not at fault."""

    async def main():
        async with setting() as it:
            (deadly,) = it.add("x", source=f"file://{write_adapter(it.folder / 'deadly')}")
            (other,) = it.add("other")
            with pytest.raises(RuntimeCrashed):
                await it.run(deadly, other)
            with pytest.raises(ModelUnavailable, match="went away"):
                await it.room.files.fetch(deadly)
            await it.room.files.fetch(other)
            (failure,) = await it.run(deadly)
            assert failure.code == ModelUnavailable.code

    run(main())


def test_adapters_make_room_where_memory_is_short(setting):
    """The one that is idle for longest goes, and the next is tried again; one in use stays."""

    async def main():
        async with setting() as it:
            a, b, c = it.add("a", "b", "c")
            roomy = replace(ENTRY, options={"max_adapters": 3})
            spec = ModelSpec(ENTRY.key, "/w", "/c", ["encode"], outputs=["dense"])
            await it.connection.load(replace(spec, options={"adapters_fit": 2}))
            assert await it.run(a, entry=roomy) == [None]
            assert await it.run(b, entry=roomy) == [None]
            assert await it.run(c, entry=roomy) == [None]
            assert it.here == {b, c}
            async with it.room._in_use(it.device, roomy, it.connection, {b, c}):
                (failure,) = await it.run(a, entry=roomy)
            assert failure.code == ModelUnavailable.code
            assert "no memory" in failure.message

    run(main())


def test_adapters_need_an_option_that_is_a_number(setting):
    """What is wrong is named; nothing else of the worker suffers."""

    async def main():
        async with setting() as it:
            (a,) = it.add("a")
            with pytest.raises(ModelUnavailable, match="max_adapters"):
                await it.run(a, entry=replace(ENTRY, options={"max_adapters": "many"}))
            (failure,) = await it.run(a, entry=replace(ENTRY, options={"max_adapters": 0}))
            assert "takes no adapters" in failure.message

    run(main())


def test_adapters_go_with_their_copy_and_with_their_entry(setting):
    """A copy that was loaded again has none; one that left the catalog goes when it is idle."""

    async def main():
        async with setting() as it:
            a, b = it.add("a", "b")
            await it.run(a, b)
            del it.catalog[a]
            it.room.on_catalog([it.device])
            await until(lambda: it.here == {b})
            it.device.resident[ENTRY.key] = Loaded(ENTRY, 100, 1.0, 1.0)
            assert it.here == set()
            assert await it.run(b) == [None]
            del it.device.resident[ENTRY.key]
            with pytest.raises(RuntimeCrashed):
                await it.run(b)

    run(main())


def test_adapters_that_the_catalog_has_not_told_of_yet_are_waited_for(setting, monkeypatch):
    """A worker may hear of an adapter later than a gateway, and not for ever."""

    async def main():
        async with setting() as it:
            waiting = asyncio.create_task(it.room.files.fetch("m@late@1"))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            it.add("late")
            await waiting
            monkeypatch.setattr(adapter_files, "NEWS_S", 0.01)
            with pytest.raises(UnknownModel):
                await it.room.files.fetch("m@never@1")

    run(main())


def test_bounds_items_that_wait_for_adapters(setting):
    """Of more items than may wait for fetches one is refused, and no more fetches run than may.

    They wait for those of a store that is silent. What kept the files from coming is every waiting
    item's error.
    """

    async def main():
        async with setting() as it:
            silent, fetches = threading.Event(), it.room.files._fetches
            others = [
                asyncio.create_task(fetches.run(silent.wait)) for _ in range(MAX_ADAPTER_FETCHES)
            ]
            names = [f"a{n}" for n in range(2 * MAX_ADAPTER_FETCHES)]
            keys = it.add(*names, source="az://bucket/none")  # of no account
            waiting = [
                asyncio.create_task(it.room.files.fetch(keys[at % len(keys)]))
                for at in range(MAX_AWAITING_ADAPTERS)
            ]
            await asyncio.sleep(0)
            with pytest.raises(ModelLoading) as caught:
                await it.room.files.fetch(keys[0])
            assert caught.value.retry_after_s
            assert len(it.room.files._fetching) == len(keys)
            await asyncio.sleep(0.05)
            assert it.room.files._fetches.busy == MAX_ADAPTER_FETCHES
            assert not any(task.done() for task in waiting)
            silent.set()
            errors = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(error) for error in errors} == {WeightsMissing}
            await asyncio.gather(*others)

    run(main(), 60)
