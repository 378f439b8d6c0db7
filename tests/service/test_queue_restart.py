"""What the queue does when its broker is killed and started again."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from shoal.errors import QueueUnavailable
from shoal.queue.interface import QueueLimits
from shoal.queue.jetstream import JetStreamQueue
from shoal.queue.topology import Topology
from tests.conftest import NatsServer, run, until
from tests.support.pace import limit_s
from tests.support.queues import submit

# What a test holds does not come back while it looks, on a slow machine either.
LIMITS = QueueLimits(ack_wait_s=limit_s(3.0))
MODEL = "org/some.model"


async def _open(server):
    topology = Topology("restart", "file", 1, LIMITS, ("interactive", "bulk"))
    return await JetStreamQueue.open(server.address, topology, name="test")


async def _submit(queue, data, refused):
    await queue.submit(
        MODEL,
        "interactive",
        data,
        item_id=uuid.uuid4().hex,
        ttl_s=30.0,
        on_refused=refused.append,
    )


async def _pull(queue, got, max_items=10):
    ended = asyncio.Event()
    await queue.pull(
        MODEL,
        "interactive",
        max_items=max_items,
        expires_s=limit_s(1.0),
        on_delivery=got.append,
        on_end=ended.set,
    )
    return ended


def _back(queue):
    """Set once the broker has been away and all is as before."""
    back = asyncio.Event()

    async def on_back():
        back.set()

    queue.when_back(on_back)
    return back


def test_queue_work_and_connections_survive_a_killed_broker(tmp_path):
    """Confirmed items are delivered after a restart, and both sides' inboxes work again."""

    async def main():
        server = NatsServer(tmp_path)
        gateway, worker = await _open(server), await _open(server)
        outcomes, refused, got = [], [], []
        await gateway.listen(outcomes.append)
        for n in range(20):
            await _submit(gateway, b"before %d" % n, refused)
        await until(lambda: not len(gateway._publishes))
        open_pull = await _pull(worker, got, max_items=100)
        await until(lambda: len(got) == 20)
        for delivery in got[:5]:
            await delivery.ack()
        await worker._link.flush()
        try:
            server.stop()
            await until(lambda: not gateway.connected and not worker.connected)
            await asyncio.to_thread(server.start)
            await until(lambda: gateway.connected and worker.connected, 10)
            await asyncio.wait_for(open_pull.wait(), limit_s(5))
            await _submit(gateway, b"after", refused)
            texts = set()
            wanted = {*(b"before %d" % n for n in range(5, 20)), b"after"}
            async with asyncio.timeout(limit_s(15)):
                while not wanted <= texts:
                    again = []
                    await (await _pull(worker, again)).wait()
                    for delivery in again:
                        texts.add(delivery.data)
                        await delivery.ack()
            # An ack that the killed broker had not stored yet is forgotten: at least once.
            assert texts <= wanted | {b"before %d" % n for n in range(5)}
            assert not refused
            await worker.reply(gateway.inbox, b"outcome")
            await until(lambda: outcomes == [b"outcome"])
        finally:
            await gateway.close()
            await worker.close()
            server.stop()

    run(main())


def test_queue_lines_are_made_by_those_who_pull(tmp_path):
    """Only a line that is pulled from has a consumer at the broker.

    It is made again where it was removed, and where a broker has forgotten everything.
    """

    async def main():
        server = NatsServer(tmp_path)
        topology = Topology("forgot", "memory", 1, LIMITS, ("interactive",))
        queue = await JetStreamQueue.open(server.address, topology, name="test")

        async def made():
            infos = await queue._js.consumers_info(topology.stream)
            return [info.name for info in infos]

        for model in (MODEL, "rests@1"):
            await submit(queue, model=model)
        assert await made() == []
        got = []
        await _pull(queue, got, 1)
        await until(lambda: got)
        await got.pop().ack()
        name = topology.consumer(MODEL, "interactive")
        assert await made() == [name]
        await queue._js.delete_consumer(topology.stream, name)
        await submit(queue, b"after", model=MODEL)
        async with asyncio.timeout(limit_s(10)):
            while not got:
                ended = await _pull(queue, got, 1)
                await ended.wait()
        assert got.pop().data == b"after"
        back = _back(queue)
        server.stop()
        await until(lambda: not queue.connected)
        await asyncio.to_thread(server.start)
        await asyncio.wait_for(back.wait(), limit_s(10))
        assert await made() == []
        await submit(queue, b"new", model=MODEL)
        await _pull(queue, got)
        await until(lambda: got)
        assert got[0].data == b"new"
        await queue.close()
        server.stop()

    run(main())


def test_queue_pulls_of_an_outage_do_not_pile_up(tmp_path):
    """While the broker is away a pull is refused at once, and nothing of it is sent later."""

    async def main():
        server = NatsServer(tmp_path)
        worker, got = await _open(server), []
        back = _back(worker)
        server.stop()
        await until(lambda: not worker.connected)
        for _ in range(5):
            async with asyncio.timeout(limit_s(3)):
                with pytest.raises(QueueUnavailable):
                    await _pull(worker, got)
        await asyncio.to_thread(server.start)
        gateway = await _open(server)
        for n in range(20):
            await _submit(gateway, b"%d" % n, [])
        await asyncio.wait_for(back.wait(), limit_s(10))
        ended = await _pull(worker, got, max_items=3)
        await asyncio.wait_for(ended.wait(), limit_s(5))
        await (await _pull(gateway, rest := [], max_items=20)).wait()
        assert len(got) == 3
        assert [delivery.attempt for delivery in (*got, *rest)] == [1] * 20
        await gateway.close()
        await worker.close()
        server.stop()

    run(main())


def test_queue_items_that_arrive_after_their_pull_ended_have_had_no_attempt(nats_server):
    """What was on its way when a line was withdrawn goes to others as the same attempt."""

    async def main():
        topology = Topology(f"t{uuid.uuid4().hex[:8]}", "memory", 1, LIMITS, ("interactive",))
        a = await JetStreamQueue.open(nats_server.address, topology, name="test")
        b = await JetStreamQueue.open(nats_server.address, topology, name="test")
        got = []
        await _pull(a, got)
        a._pulls.clear()  # as when it was withdrawn just before the items arrive
        for n in range(10):
            await _submit(b, b"%d" % n, [])
        await until(lambda: len(a._untouched._counts) == 10)
        await asyncio.wait_for((await _pull(b, got)).wait(), limit_s(5))
        assert [delivery.attempt for delivery in got] == [1] * 10
        await a.close()
        await b.close()

    run(main())


def test_queue_large_messages_arrive_whole_among_small_ones(nats_server):
    """Items of half a megabyte and of one byte, sent at once, come out as they went in."""

    async def main():
        topology = Topology(f"t{uuid.uuid4().hex[:8]}", "memory", 1, LIMITS, ("interactive",))
        queue = await JetStreamQueue.open(nats_server.address, topology, name="test")
        sent = [bytes([n]) * (500_000 if n % 3 else 1) for n in range(24)]
        refused, got = [], []
        for data in sent:
            await _submit(queue, data, refused)
        ended = await _pull(queue, got, max_items=len(sent))
        await asyncio.wait_for(ended.wait(), limit_s(10))
        assert [delivery.data for delivery in got] == sent
        assert not refused
        await queue.close()

    run(main())
