"""Jobs through a queue: what is published, counted, refused and withdrawn."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from shoal.catalog.snapshot import Snapshot
from shoal.clock import wall
from shoal.core.lanes import DEFAULT_LANES, parse_lanes
from shoal.errors import Bug, InvalidRequest, ModelLoading, Overloaded, QueueFull, RunFailed
from shoal.gateway.backlog import BacklogBook
from shoal.gateway.fleet import Fleet
from shoal.gateway.jobs import Job
from shoal.gateway.submit import _LOAD_GUESS_S
from shoal.wire.arrays import Array
from shoal.wire.envelope import (
    Failure,
    Inputs,
    ModelState,
    Outcome,
    Params,
    Result,
    Status,
    encode,
)
from tests.conftest import run, until
from tests.support.pace import limit_s
from tests.support.submit_place import ENTRY, LINE_ITEMS, Place


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
            job = place.job(4, chars=28)  # two to an item
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


def test_submit_large_result_that_nobody_waits_for_makes_room():
    """Its payload is deleted when it comes, and not after an hour; one that is fetched is not."""

    async def main():
        async with Place() as place:
            job = place.start(1)
            (item,) = await place.take(1)
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)
            held = place.queue._broker.payloads
            ref = await place.hand.payloads.put(b"x" * 1000)
            await place.hand.reply(item.reply, encode(Outcome(item.item, payload=ref)))
            await until(lambda: not held)
            job = place.start(1)
            (item,) = await place.take(1)
            data = encode(Result({"dense": Array.of(np.ones((1, 1), np.float32))}))
            ref = await place.hand.payloads.put(data)
            for _ in range(3):  # said again after a reconnection, for example
                await place.hand.reply(item.reply, encode(Outcome(item.item, payload=ref)))
            await asyncio.wait_for(job, limit_s(5))
            await until(lambda: not held)

    run(main())
