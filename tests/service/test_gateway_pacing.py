"""How much of a request, of a tenant and of a gateway lies in a line at once."""

from __future__ import annotations

import asyncio

import pytest

from shoal.catalog.snapshot import Snapshot
from shoal.core.lanes import DEFAULT_LANES, parse_lanes
from shoal.errors import InvalidRequest
from shoal.gateway.backlog import BacklogBook
from shoal.gateway.fleet import Fleet
from shoal.wire.envelope import (
    Failure,
    decode_inputs,
    encode,
)
from tests.conftest import run, until
from tests.support.pace import limit_s
from tests.support.submit_place import Place


def test_submit_paces_a_large_request_and_lets_others_in():
    """Of forty items three quanta lie in the line; each outcome lets one follow, in turns.

    A small job of the same tenant, and one of another, go in at once.
    """

    async def main():
        async with Place(paced=True) as place:
            large = place.start(40)  # a quantum has 100 tokens, and each item has them
            await until(lambda: place.waiting_items() == 3)
            await asyncio.sleep(0.05)
            assert place.waiting_items() == 3
            same, other = place.start(1), place.start(1, tenant="other")
            await until(lambda: place.waiting_items() == 5)
            late = place.start(1)  # the room for first items is taken: it waits, for one in turn
            await asyncio.sleep(0.05)
            assert place.waiting_items() == 5
            for item in await place.take(5):
                await place.answer(item)
            await asyncio.gather(same, other)
            async with asyncio.timeout(limit_s(10)):
                while not late.done():
                    for item in await place.take(1):
                        await place.answer(item)
                        await asyncio.sleep(0)
            assert not large.done()
            assert place.waiting_items() <= 3
            large.cancel()
            await asyncio.gather(large, return_exceptions=True)
            assert place.submitter._pacing._lines == {}

    run(main())


@pytest.mark.parametrize("why", ["client", "deadline", "failure"])
def test_submit_paced_request_that_ends_early_frees_its_place(why):
    """Whatever ends it, nothing of it stays in the way of the next."""

    async def main():
        async with Place(paced=True) as place:
            job = place.start(40, time_s=limit_s(0.3) if why == "deadline" else 60.0)
            (first, *_) = await place.take(3)
            if why == "failure":
                await place.answer(first, Failure.of(InvalidRequest("bad", input_index=0)))
            if why == "client":
                job.cancel()
            await asyncio.wait([job], timeout=limit_s(5))
            assert job.done()
            assert place.submitter._pacing._lines == {}
            assert place.tokens() == {}
            after = place.start(3)
            sizes = [len(decode_inputs(bytes(e.body)).texts) for e in await place.take(3)]
            assert sizes == [1, 1, 1]
            after.cancel()
            await asyncio.gather(job, after, return_exceptions=True)

    run(main())


def test_submit_gateways_share_the_window_of_a_line():
    """Where another gateway says that it has work there, each puts in half as much."""

    async def main():
        async with Place(paced=True) as place:
            other = BacklogBook(Fleet(), lambda: Snapshot([]), parse_lanes(DEFAULT_LANES), name="o")
            other.add("interactive", "m@1", 20_000, 1)
            place.book.on_backlog(encode(other.message()))
            job = place.start(20)
            await until(lambda: place.waiting_items() == 1)
            await asyncio.sleep(0.05)
            assert place.waiting_items() == 1
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)

    run(main())
