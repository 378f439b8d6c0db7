"""Jobs through a queue: what is published, counted, refused and withdrawn."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from shoal.catalog.schema import Entry, Output, Profile
from shoal.catalog.snapshot import Snapshot
from shoal.clock import wall
from shoal.core.lanes import DEFAULT_LANES, parse_lanes
from shoal.errors import Bug, InvalidRequest, ModelLoading, Overloaded, QueueFull, RunFailed
from shoal.gateway.backlog import BacklogBook
from shoal.gateway.fleet import Fleet
from shoal.gateway.jobs import Job
from shoal.gateway.submit import _LOAD_GUESS_S, Submitter
from shoal.queue.interface import QueueLimits
from shoal.queue.memory import MemoryBroker, MemoryQueue
from shoal.settings import GatewaySettings
from shoal.wire.arrays import Array
from shoal.wire.envelope import (
    Failure,
    Inputs,
    ModelState,
    Outcome,
    Params,
    Result,
    Status,
    decode_cancel,
    decode_envelope,
    decode_inputs,
    encode,
)
from tests.conftest import run, until
from tests.support.pace import limit_s

ENTRY = Entry(
    id="m",
    tasks=["encode"],
    source="file:///x",
    outputs={"dense": Output(1)},
    profile=Profile(tokens_per_s=1000.0),
)
LINE_ITEMS = 24


class Place:
    """A gateway's submit path on one side of a queue, a worker's hand on the other."""

    def __init__(self, *, workers=1, **settings):
        broker = MemoryBroker(QueueLimits(max_queued_per_line=LINE_ITEMS))
        self.queue, self.hand = MemoryQueue(broker), MemoryQueue(broker)
        settings = GatewaySettings(**settings)
        self.fleet = fleet = Fleet()
        catalog = Snapshot([ENTRY])
        lanes = parse_lanes(DEFAULT_LANES)
        self.book = BacklogBook(fleet, lambda: catalog, lanes, name="g")
        self.submitter = Submitter(self.queue, fleet, self.book, settings)
        self.cancelled = []
        if workers:
            state = ModelState("m@1", "resident", bytes_per_token=1.0)
            fleet.on_status(encode(Status("w", [state], devices=workers)))

    async def __aenter__(self):
        await self.queue.listen(self.submitter.on_outcome)
        await self.hand.hear("cancel", lambda data: self.cancelled.append(decode_cancel(data)))
        return self

    async def __aexit__(self, *_):
        await self.hand.close()
        await self.queue.close()

    def job(self, n=1, *, chars=98, time_s=30.0, lane="interactive", tenant=None):
        """N inputs of chars + 2 tokens each: an item each, for a quantum has 100 tokens."""
        texts = Inputs(texts=["x" * chars] * n)
        deadline_s = wall() + time_s
        return Job("r", "encode", ENTRY, texts, Params(), lane, deadline_s, tenant=tenant)

    def files(self, sizes, *, partial=True):
        """A job of files that are no texts, one of each size."""
        blobs = Inputs(blobs=[b"x" * n for n in sizes])
        params = Params(partial=partial)
        return Job("r", "encode", ENTRY, blobs, params, "interactive", wall() + 30.0)

    def start(self, *arguments, **options):
        return asyncio.create_task(self.submitter.run(self.job(*arguments, **options)))

    async def take(self, n, lane="interactive"):
        """The envelopes of the next n items."""
        found = []
        await self.hand.pull(
            "m@1",
            lane,
            max_items=n,
            expires_s=limit_s(5.0),
            on_delivery=found.append,
            on_end=lambda: None,
        )
        await until(lambda: len(found) == n)
        for delivery in found:
            await delivery.ack()
        return [decode_envelope(delivery.data) for delivery in found]

    async def answer(self, envelope, failure=None, failures=None):
        """A row for each input that is not in `failures`: the length of its text or file."""
        inputs = decode_inputs(bytes(envelope.body))
        given = inputs.texts or inputs.blobs
        rows = [len(one) for i, one in enumerate(given) if i not in (failures or {})]
        block = np.array(rows, np.float32).reshape(-1, 1)
        result = msgspec.Raw(encode(Result({"dense": Array.of(block)})))
        outcome = (
            Outcome(envelope.item, failure=failure)
            if failure
            else Outcome(envelope.item, result=result, tokens=len(rows), failures=failures or {})
        )
        await self.hand.reply(envelope.reply, encode(outcome))

    def tokens(self):
        return self.book.message().tokens

    def waiting_items(self):
        lines = self.hand._broker.lines.values()
        return sum(len(line.waiting) for line in lines)


def test_submit_counts_a_job_until_each_item_ends():
    """Tokens are counted at submit, by lane and model, and go item by item, also a second time."""

    async def main():
        async with Place() as place:
            job = place.start(3, lane="bulk", tenant="team")
            items = await place.take(3, lane="bulk")
            assert [(e.tenant, e.cost_tokens) for e in items] == [("team", 100)] * 3
            assert place.tokens() == {"bulk": {"m@1": 300}}
            await place.answer(items[1])
            await place.answer(items[1])
            await until(lambda: place.tokens() == {"bulk": {"m@1": 200}})
            await place.answer(items[0])
            await place.answer(items[2])
            assert (await job).tokens == 3
            assert place.tokens() == {}
            await asyncio.sleep(0)
            assert place.cancelled == []

    run(main())


def test_submit_counts_bytes_and_not_characters():
    """A text outside ASCII costs by its bytes of UTF-8, at the ratio that workers report."""

    async def main():
        async with Place() as place:
            job = place.job()
            job = Job("r", "encode", ENTRY, Inputs(texts=["日本語"]), Params(), "bulk", wall() + 9)
            task = asyncio.create_task(place.submitter.run(job))
            (item,) = await place.take(1, lane="bulk")
            assert item.cost_tokens == 9 + 2
            await place.answer(item)
            await task

    run(main())


def test_submit_publishes_nothing_of_what_it_refuses():
    """A job that cannot be in time is refused before an item is in the queue, and not counted."""

    async def main():
        async with Place() as place:
            first = place.start(8, chars=998)  # 8 s of work
            await until(lambda: place.waiting_items() == 8)
            small = place.start(1, time_s=9.0)
            await until(lambda: place.waiting_items() == 9)
            before = place.tokens()
            with pytest.raises(Overloaded) as refused:
                await place.submitter.run(place.job(1, time_s=5.0))
            assert 3 <= refused.value.retry_after_s <= 4
            with pytest.raises(Overloaded):
                await place.submitter.run(place.job(12, time_s=9.0))
            assert place.waiting_items() == 9
            assert place.tokens() == before
            for item in await place.take(9):
                await place.answer(item)
            await asyncio.gather(first, small)
            # The same jobs on the idle fleet.
            again = place.start(12, time_s=9.0)
            for item in await place.take(12):
                await place.answer(item)
            await again

    run(main())


def test_submit_admits_anything_while_no_worker_is_known():
    """Without a heartbeat nothing is known of the fleet, and nothing is refused."""

    async def main():
        async with Place(workers=0) as place:
            jobs = [place.start(4, chars=60_000, time_s=20.0) for _ in range(4)]
            for item in await place.take(16):
                await place.answer(item)
            await asyncio.gather(*jobs)

    run(main())


def test_submit_withdraws_the_rest_of_a_failed_request():
    """The first failure ends the request: its other items are cancelled and not counted."""

    async def main():
        async with Place() as place:
            job = place.start(10)
            items = await place.take(10)
            await place.answer(items[9], Failure.of(InvalidRequest("bad", input_index=0)))
            with pytest.raises(InvalidRequest) as failed:
                await job
            assert failed.value.param == "inputs[9]"
            assert place.tokens() == {}
            await until(lambda: [c.request for c in place.cancelled] == [items[0].request])

    run(main())


def test_submit_partial_job_answers_the_inputs_that_are_well():
    """A file is an item; one that fails leaves its place to a failure, the others keep theirs."""

    async def main():
        async with Place() as place:
            job = asyncio.create_task(place.submitter.run(place.files([3, 5, 7, 9])))
            items = await place.take(4)
            assert [(e.n_inputs, e.params.partial) for e in items] == [(1, True)] * 4
            await place.answer(items[3])
            await place.answer(items[1], Failure.of(InvalidRequest("broken", input_index=0)))
            await place.answer(items[2], failures={0: Failure.of(InvalidRequest("empty"))})
            await place.answer(items[0])
            answer = await job
            dense = answer.result.arrays["dense"]
            assert np.frombuffer(dense.data, "<f4").tolist() == [3, 9]
            assert {at: (f.message, f.param) for at, f in answer.failures.items()} == {
                1: ("broken", "inputs[1]"),
                2: ("empty", "inputs[2]"),
            }
            assert (answer.tokens, place.tokens(), place.cancelled) == (2, {}, [])

    run(main())


def test_submit_partial_item_may_lose_some_of_its_inputs():
    """Of texts that share an item, the failed one is counted over the request."""

    async def main():
        async with Place() as place:
            job = place.job(4, chars=48)  # two to an item
            params = Params(partial=True)
            job = asyncio.create_task(
                place.submitter.run(msgspec.structs.replace(job, params=params))
            )
            first, second = await place.take(2)
            await place.answer(first)
            await place.answer(second, failures={1: Failure.of(InvalidRequest("too odd"))})
            answer = await job
            assert answer.result.arrays["dense"].shape == [3, 1]
            assert set(answer.failures) == {3}

    run(main())


def test_submit_partial_job_without_any_good_input_fails():
    """Where every input has failed, the first one's error is the request's."""

    async def main():
        async with Place() as place:
            job = asyncio.create_task(place.submitter.run(place.files([1, 2])))
            first, second = await place.take(2)
            await place.answer(second, Failure.of(RunFailed("the second")))
            await place.answer(first, Failure.of(InvalidRequest("the first", input_index=0)))
            with pytest.raises(InvalidRequest, match="the first") as failed:
                await job
            assert failed.value.param == "inputs[0]"

    run(main())


def test_submit_failures_of_inputs_that_are_not_there_are_a_bug():
    """A worker that counts wrongly is never believed."""

    async def main():
        async with Place() as place:
            job = asyncio.create_task(place.submitter.run(place.files([1])))
            (item,) = await place.take(1)
            await place.answer(item, failures={4: Failure.of(InvalidRequest("who?"))})
            with pytest.raises(Bug):
                await job

    run(main())


@pytest.mark.parametrize(
    ("load_s", "loading_s", "after_s"), [(9.0, 2.5, 6.5), (0.0, 1.0, _LOAD_GUESS_S - 1.0)]
)
def test_submit_deadline_during_a_load_says_when_it_should_end(load_s, loading_s, after_s):
    """A model that is not there in time is a 503 with what its load has left, as last measured."""

    async def main():
        async with Place(workers=0) as place:
            state = ModelState("m@1", "loading", load_s=load_s, loading_s=loading_s)
            place.fleet.on_status(encode(Status("w", [state])))
            with pytest.raises(ModelLoading) as late:
                await place.submitter.run(place.job(1, time_s=0.05))
            assert late.value.retry_after_s == after_s

    run(main())


@pytest.mark.parametrize("why", ["client", "deadline"])
def test_submit_withdraws_what_nobody_waits_for(why):
    """A caller that leaves, and a deadline, cancel the request and end its count."""

    async def main():
        async with Place() as place:
            job = place.start(8, time_s=limit_s(0.3) if why == "deadline" else 60)
            items = await place.take(8)
            if why == "client":
                job.cancel()
            done, _ = await asyncio.wait([job], timeout=limit_s(5))
            assert done
            assert job.cancelled() or job.exception().code == "deadline_exceeded"
            assert place.tokens() == {}
            await until(lambda: [c.request for c in place.cancelled] == [items[0].request])

    run(main())


def test_submit_full_line_says_when_it_has_room():
    """QueueFull from the broker has a computed Retry-After, and the job is withdrawn."""

    async def main():
        async with Place() as place:
            jobs = [
                place.start(1, chars=7998, time_s=1000.0) for _ in range(LINE_ITEMS)
            ]  # 8 s of work each
            await until(lambda: place.waiting_items() == LINE_ITEMS)
            with pytest.raises(QueueFull) as full:
                await place.submitter.run(place.job(1, time_s=1000.0))
            assert 19.2 <= full.value.retry_after_s <= 19.3
            assert place.tokens() == {"interactive": {"m@1": LINE_ITEMS * 8000}}
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    run(main())


def test_submit_gateways_count_one_anothers_work():
    """A gateway refuses for the sake of what another one waits for, and tells of its own."""

    async def main():
        async with Place() as place:
            said = []
            await place.hand.hear("backlog", said.append)
            await place.queue.hear("backlog", place.book.on_backlog)
            beat = asyncio.create_task(place.book.run(place.queue))
            other = BacklogBook(Fleet(), lambda: Snapshot([]), parse_lanes(DEFAULT_LANES), name="o")
            other.add("interactive", "m@1", 20_000, 1)
            await place.hand.tell("backlog", encode(other.message()))
            await until(lambda: len(said) == 2)
            with pytest.raises(Overloaded):
                await place.submitter.run(place.job(1, time_s=5.0))
            assert place.tokens() == {}
            beat.cancel()

    run(main())
