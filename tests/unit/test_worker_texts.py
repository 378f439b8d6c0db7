"""Slots are given back, and texts go to the process that has their model, whatever happens between.

The rooms are real; only what would start a process stands in for it.
"""

from __future__ import annotations

import asyncio

import pytest

from shoal.catalog.check import sense
from shoal.catalog.schema import Entry, Profile, Sampling
from shoal.clock import monotonic, wall
from shoal.core.lanes import parse_lanes
from shoal.core.types import Item
from shoal.ipc.messages import RunItem, Traits
from shoal.queue.interface import QueueLimits
from shoal.queue.memory import MemoryBroker, MemoryQueue
from shoal.wire.envelope import Envelope, Inputs, Params
from shoal.wire.generation import Generation
from shoal.worker.costs import CostBook
from shoal.worker.demand import DemandBook
from shoal.worker.device import Device, Loaded
from shoal.worker.held import Held, HeldItem
from shoal.worker.lines import SlotLine
from shoal.worker.metrics import Metrics
from shoal.worker.streams import Streams
from shoal.worker.tokenise import prepare
from tests.conftest import run

LANES = parse_lanes("interactive:8:100ms:1s,bulk:2:400ms:5s")


class Processes:
    """What `Streams` asks of the residents: one device, whose processes only note who asks."""

    def __init__(self, entry):
        self.devices = [Device("cpu#0")]
        self.asked = []
        self.unavailable = False
        self.hold(entry)

    def hold(self, entry):
        self.devices[0].resident[entry.key] = Loaded(entry, 1, 0.0, 0.0, slots=2)

    def device(self, name):
        return self.devices[0]

    def process(self, device, entry):
        self.asked.append(entry.process)
        raise ConnectionError("no process is started here")

    def state(self, entry):
        return "unavailable" if self.unavailable else "resident"

    def fault(self, entry):
        return None

    def load_wait_s(self, entry, since_s):
        return 0.0


def entry(runtime="candle", **more):
    return Entry("g", ["generate"], "file:///", runtime=runtime, **more)


class Room:
    """Streams with what they need, and one line for each lane."""

    def __init__(self, tmp_path, first):
        queue = MemoryQueue(MemoryBroker(QueueLimits()))
        self.held = Held(queue, worker="w", ack_wait_s=9.0, max_attempts=1, inline_max=9_999)
        self.processes = Processes(first)
        self.lines = {}
        self.streams = Streams(
            self.held,
            self.processes,
            self.lines,
            LANES,
            metrics=Metrics(),
            costs=CostBook(tmp_path / "costs.json", "test"),
            run_timeout_s=9.0,
        )
        for rule in LANES:
            line = SlotLine(first, rule.name, devices=1, window_items=9, budget_tokens=99)
            line.room = self.streams.room
            self.lines[(first.key, rule.name)] = line

    def add(self, name, model):
        envelope = Envelope(
            *(name, name, 0, 1, "generate", "g", "1", "interactive", 3, 1),
            deadline_s=wall() + 9,
            submitted_s=wall(),
            reply="nobody",
        )
        held = HeldItem(Delivery(), envelope, monotonic(), key=model.key)
        held.run_item = RunItem(name, "generate", [3], texts=["hello"])
        self.held.add(held)
        self.streams.add(model, Item(name, model.key, "interactive", (3,), monotonic() + 9, 0.0))


class Delivery:
    """A delivery of which nothing is asked but to be done with."""

    data, attempt = b"", 1

    async def ack(self):
        pass

    async def nak(self, *_args, **_more):
        pass


async def turns(n=20):
    for _ in range(n):
        await asyncio.sleep(0)


@pytest.fixture
def room(tmp_path):
    return Room(tmp_path, entry())


def test_texts_give_their_slot_back_when_cancelled_before_their_first_step(room):
    """A cancel in the very turn of the loop in which a text begins loses no slot."""

    async def main():
        looping = asyncio.create_task(room.streams.run())
        room.add("a", entry())
        room.streams._fill(room.streams._model(entry()))
        (loaded,) = room.processes.devices[0].resident.values()
        assert loaded.texts == 1
        assert room.streams.stop("a")
        room.held.forget("a")
        await turns()
        assert loaded.texts == 0
        assert room.streams.room(entry(), "interactive") == 2
        looping.cancel()

    run(main())


def test_texts_go_to_the_process_of_the_runtime_that_serves_now(room):
    """Once another runtime has the model, texts go to its process, and not to the old one's."""

    async def main():
        assert room.streams.room(entry(), "interactive") == 2
        other = entry("sglang")
        for line in room.lines.values():
            line.entry = other
        room.processes.hold(other)
        looping = asyncio.create_task(room.streams.run())
        room.add("a", other)
        await turns()
        assert room.processes.asked == [other.process]
        looping.cancel()

    run(main())


def test_texts_follow_the_entry_as_it_is_now(room):
    """A changed bound on a token's time counts from now on."""
    room.streams.room(entry(), "interactive")
    room.streams.room(entry(profile=Profile(max_token_ms=50.0)), "interactive")
    assert room.streams._models["g@1"].slots.max_token_s == pytest.approx(0.05)


def test_texts_of_a_model_that_cannot_be_loaded_are_pulled_to_be_told_so(room):
    """Without a copy there are no slots, but an item is pulled where its model is unavailable."""
    room.processes.devices[0].resident.clear()
    line = room.lines[("g@1", "interactive")]
    assert line.next_pull() == 0
    room.processes.unavailable = True
    assert line.next_pull() == 1


def test_demand_does_not_count_texts_that_have_their_slots():
    """The broker counts a text until it is whole; one that grows somewhere waits for nothing."""
    book = DemandBook()
    counts = {("g@1", "interactive"): 3, ("g@1", "bulk"): 1, ("e@1", "bulk"): 2}
    for now_s in (0.0, 10.0):
        book.on_counts(counts, set(), now_s, {"g@1": 4, "gone@1": 7})
    assert book.waiting == {"g@1": 0, "e@1": 2}
    assert (book.waited_s("g@1"), book.waited_s("e@1")) == (0.0, 20.0)


@pytest.mark.parametrize(("asked", "used"), [(None, 0.2), (0.0, 0.0), (1.5, 1.5)])
def test_texts_are_sampled_as_the_entry_says_where_a_request_does_not(asked, used):
    """The entry's temperature holds for who names none, and for nobody else."""
    model = entry(sampling=Sampling(temperature=0.2))
    envelope = Envelope(
        *("i", "r", 0, 1, "generate", "g", "1", "interactive", 3, 1),
        deadline_s=wall() + 9,
        submitted_s=wall(),
        reply="nobody",
        params=Params(generation=Generation(temperature=asked)),
    )
    traits = Traits(accepts_ids=False, tasks=["generate"])
    made = prepare(model, traits, None, envelope, Inputs(texts=["hello"])).run_item
    assert made is not None
    assert made.params.generation.temperature == used


def test_sampling_is_a_generators():
    """An entry that does not generate has nothing to sample."""
    model = Entry("e", ["classify"], "file:///", labels=["a", "b"], sampling=Sampling(top_k=1))
    assert [finding.path for finding in sense(model)] == ["sampling"]
    assert not list(sense(entry(sampling=Sampling(top_k=1))))
