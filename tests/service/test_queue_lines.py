"""The lines of a queue: counting what they hold, removing those that hold nothing."""

from __future__ import annotations

import asyncio
import uuid
from functools import partial

import pytest

from shoal.queue.interface import QueueLimits
from shoal.queue.jetstream import JetStreamQueue
from shoal.queue.topology import Topology, name_of, token
from tests.conftest import run
from tests.support.pace import limit_s
from tests.support.queues import Line, opened, submit


@pytest.fixture(params=["memory", "jetstream"])
def pool(request):
    server = request.getfixturevalue("nats_server") if request.param == "jetstream" else None
    return partial(opened, request.param, server)


ODD_MODELS = ["a", "org/a.b@1", "org/a_b-1@v=2", "Ünïcode Model@2", "a=b", "a=3Db", "*.>"]


def test_queue_counts_are_what_was_published(pool):
    """Waiting and held items are counted by line, under the models' own names, whoever made it."""

    async def main():
        async with pool() as p:
            gateway, worker = await p.queue(), await p.queue()
            want = {}
            for n, model in enumerate(ODD_MODELS):
                for lane, count in (("interactive", 1 + n % 3), ("bulk", n % 2)):
                    if count:
                        want[(model, lane)] = count
                    for _ in range(count):
                        await submit(gateway, model=model, lane=lane)

            async def counted():
                async with asyncio.timeout(limit_s(5)):
                    while await worker.counts() != want:
                        await asyncio.sleep(0.02)

            await counted()
            line = Line(worker, ODD_MODELS[1])
            await line.pull()
            held = await line.one()
            await counted()
            await held.ack()
            want[(ODD_MODELS[1], "interactive")] -= 1
            await counted()

    run(main())


def test_queue_removes_the_lines_that_hold_nothing(pool):
    """A line with a waiting or held item stays, of either lane; a removed one can be made again."""

    async def main():
        async with pool() as p:
            queue = await p.queue()
            await submit(queue, model="bulk@1", lane="bulk")
            await submit(queue, model="held@1")
            line = Line(queue, "held@1")
            await line.pull()
            held = await line.one()
            async with asyncio.timeout(limit_s(5)):
                while len(await queue.counts()) < 2:
                    await asyncio.sleep(0.02)
            assert await queue.remove_lines(["empty@1", "bulk@1", "held@1"]) == ["empty@1"]
            await held.ack()
            async with asyncio.timeout(limit_s(5)):
                while not await queue.remove_lines(["held@1"]):
                    await asyncio.sleep(0.02)
            again = Line(queue, "empty@1")
            await submit(queue, b"new", model="empty@1")
            await again.pull()
            assert (await again.one()).data == b"new"

    run(main())


def test_queue_line_names_have_an_inverse():
    """Every model's token gives its name again, and is one token of a subject."""
    for model in ODD_MODELS:
        assert name_of(token(model)) == model
        assert not set(token(model)) & set(".*> ")
    assert len({token(model) for model in ODD_MODELS}) == len(ODD_MODELS)


@pytest.mark.slow
def test_queue_counts_more_lines_than_one_answer_has(nats_server):
    """A broker tells a hundred thousand lines at a time: the others are asked for."""
    n_lines = 100_050

    async def main():
        topology = Topology(f"t{uuid.uuid4().hex[:8]}", "memory", 1, QueueLimits(), ("bulk",))
        queue = await JetStreamQueue.open(nats_server.address, topology, name="test")
        for n in range(n_lines):
            queue._link.send(topology.line(f"m{n}", "bulk").encode(), b"x")
            if n % 2000 == 0:
                await queue._link.flush()
        counts = {}
        while len(counts) < n_lines:
            counts = await queue.counts()
        assert set(counts.values()) == {1}
        assert counts.keys() == {(f"m{n}", "bulk") for n in range(n_lines)}
        await queue._js.delete_stream(topology.stream)
        await queue.close()

    run(main(), 60)
