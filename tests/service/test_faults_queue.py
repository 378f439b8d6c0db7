"""What the queue's client does about a broker that dies at the worst moment."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid

import psutil
import pytest
import uvloop

from shoal.queue.interface import QueueLimits
from shoal.queue.jetstream import JetStreamQueue
from shoal.queue.topology import Topology
from tests.conftest import NatsServer, run, until
from tests.support.pace import limit_s

pytestmark = pytest.mark.slow

MODEL = "m"


async def opened(server, storage):
    limits = QueueLimits(ack_wait_s=limit_s(5.0))
    topology = Topology("faults", storage, 1, limits, ("interactive",))
    return await JetStreamQueue.open(server.address, topology, name="test")


async def pull(queue, got, expires_s):
    ended = asyncio.Event()
    await queue.pull(
        MODEL,
        "interactive",
        max_items=10,
        expires_s=expires_s,
        on_delivery=got.append,
        on_end=ended.set,
    )
    await asyncio.wait_for(ended.wait(), expires_s + limit_s(3))


@pytest.mark.parametrize("storage", ["file", "memory"])
def test_faults_queue_items_on_their_way_to_a_dying_broker_are_sent_again(tmp_path, storage):
    """A broker that dies before it has read anything costs no item, and none comes twice."""

    async def main():
        server = NatsServer(tmp_path)
        queue = await opened(server, storage)
        refused, got, back = [], [], asyncio.Event()

        async def on_back():
            back.set()

        queue.when_back(on_back)
        server.process.send_signal(signal.SIGSTOP)
        stopped = psutil.Process(server.process.pid)  # a busy machine takes its time to stop it
        await until(lambda: stopped.status() == psutil.STATUS_STOPPED)
        for n in range(20):
            await queue.submit(
                MODEL,
                "interactive",
                b"item %d" % n,
                item_id=uuid.uuid4().hex,
                ttl_s=30.0,
                on_refused=refused.append,
            )
        await until(lambda: not queue._link._pending)  # all are on their way
        server.stop()
        await until(lambda: not queue.connected)
        await asyncio.to_thread(server.start)
        await asyncio.wait_for(back.wait(), limit_s(10))
        while len(got) < 20:
            await pull(queue, got, limit_s(0.3))
            for delivery in got:
                await delivery.ack()
        await pull(queue, got, limit_s(0.3))
        assert sorted(d.data for d in got) == sorted(b"item %d" % n for n in range(20))
        assert not refused
        await queue.close()
        server.stop()

    run(main(), 30)


def test_faults_queue_pull_without_a_stream_ends_after_a_pause(tmp_path):
    """A pull that the broker refuses at once is not repeated at once: no loop runs hot."""

    async def main():
        server = NatsServer(tmp_path)
        queue = await opened(server, "memory")
        await pull(queue, [], 0.1)
        await queue._js.delete_stream("shoal-work-faults")
        begun_s = time.monotonic()
        await pull(queue, [], limit_s(20))
        assert 0.4 < time.monotonic() - begun_s < limit_s(5)
        await queue.close()
        server.stop()

    run(main())


def test_faults_queue_closes_while_the_broker_is_away(tmp_path):
    """With messages kept for a broker that never comes back, leaving is quick and quiet."""

    async def main():
        server = NatsServer(tmp_path)
        queue = await opened(server, "memory")
        server.stop()
        await until(lambda: not queue.connected)
        await queue.reply("somebody", b"x" * 1000)
        begun_s = time.monotonic()
        await queue.close()
        assert time.monotonic() - begun_s < limit_s(2.0)

    uvloop.run(
        asyncio.wait_for(main(), limit_s(20))
    )  # as the processes do; it is stricter than asyncio
