"""Every bound at the broker, reached: refusals where work would be lost, else the oldest goes."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import time
import uuid

import psutil
import pytest

from shoal.errors import QueueFull, QueueUnavailable
from shoal.queue.connection import PENDING_BYTES, connect
from shoal.queue.interface import QueueLimits
from shoal.queue.jetstream import JetStreamQueue
from shoal.queue.publishes import MAX_UNCONFIRMED_BYTES, Publishes
from shoal.queue.server import EmbeddedServer
from shoal.queue.topology import Topology
from shoal.queue.untouched import MAX_COUNTS
from tests.conftest import NatsServer, run, until
from tests.support.pace import limit_s


async def opened(nats_server, **limits):
    """A queue of a pool of its own, with one line."""
    topology = Topology(f"b{uuid.uuid4().hex[:8]}", "file", 1, QueueLimits(**limits), ("bulk",))
    return await JetStreamQueue.open(nats_server.address, topology, name="test")


async def submit(queue, data, refused):
    await queue.submit(
        "m", "bulk", data, item_id=uuid.uuid4().hex, ttl_s=30, on_refused=refused.append
    )


def test_bounds_counts_of_untouched_items(nats_server):
    """The oldest count is forgotten over the bound; what the broker refuses is heard all the same.

    A process that starts later reads what the broker took.
    """

    async def main():
        queue = await opened(nats_server, untouched_max_bytes=100_000)
        for n in range(MAX_COUNTS + 1):
            queue._untouched.add(b"%d" % n)
            if n % 10_000 == 0:
                await queue._link.flush()
        await queue._link.flush()
        await until(lambda: queue._untouched.count(b"%d" % MAX_COUNTS))
        assert [queue._untouched.count(b"%d" % n) for n in (0, 1)] == [0, 1]
        late = await JetStreamQueue.open(nats_server.address, queue._topology, name="test")
        assert [late._untouched.count(b"%d" % n) for n in (0, MAX_COUNTS)] == [1, 0]
        await late.close()
        await queue.close()

    run(main())


def test_bounds_bytes_queued(nats_server):
    """Items over the bytes that the queue may hold are QueueFull; an ack makes room."""

    async def main():
        queue, refused, got = await opened(nats_server, max_queued_bytes=500_000), [], []
        for _ in range(8):
            await submit(queue, b"x" * 100_000, refused)
        await until(lambda: len(refused) >= 4)
        assert {type(error) for error in refused} == {QueueFull}
        await queue.pull(
            "m",
            "bulk",
            max_items=1,
            expires_s=limit_s(5),
            on_delivery=got.append,
            on_end=lambda: None,
        )
        await until(lambda: got)
        await got[0].ack()
        async with asyncio.timeout(limit_s(5)):
            while refused:  # until the broker has counted the ack
                refused.clear()
                await submit(queue, b"x" * 100_000, refused)
                await until(lambda: not len(queue._publishes))
        await queue.close()

    run(main())


def test_bounds_items_held_by_workers(nats_server):
    """Workers together hold so many items of a line unacked, and no more until they ack."""

    async def main():
        queue, got = await opened(nats_server, max_held_per_line=3), []
        for _ in range(5):
            await submit(queue, b"x", [])
        await queue.pull(
            "m",
            "bulk",
            max_items=5,
            expires_s=limit_s(8),
            on_delivery=got.append,
            on_end=lambda: None,
        )
        await until(lambda: len(got) == 3)
        await asyncio.sleep(0.2)
        assert len(got) == 3
        for delivery in got[:3]:
            await delivery.ack()
        await until(lambda: len(got) == 5)
        await queue.close()

    run(main())


def test_bounds_payload_store(nats_server):
    """A payload store that is full refuses, and takes again once something is deleted."""

    async def main():
        queue = await opened(nats_server, payload_max_bytes=1_000_000)
        first = await queue.payloads.put(b"x" * 400_000)
        await queue.payloads.put(b"y" * 400_000)
        with pytest.raises(QueueUnavailable):
            await queue.payloads.put(b"z" * 400_000)
        await queue.payloads.delete(first)
        again = await queue.payloads.put(b"z" * 400_000)
        assert await queue.payloads.get(again) == b"z" * 400_000
        await queue.close()

    run(main())


@pytest.mark.parametrize("bounds", [{"max_unconfirmed": 3}, {"max_bytes": 3}], ids=str)
def test_bounds_items_unconfirmed(nats_server, bounds):
    """Items that the broker has not confirmed are bounded: one more is QueueFull, until it does."""

    async def main():
        async def nothing() -> None:
            """Nothing is to be done after a reconnection."""

        link = await connect(
            nats_server.address, name="t", on_reconnected=nothing, wait_s=limit_s(5)
        )
        publishes = Publishes(link, b"_INBOX.bounds.", timeout_s=limit_s(5), **bounds)
        refused = []

        def send():
            publishes.send(
                b"shoal.nobody.listens", b"x", item_id="i", ttl_s=5, on_refused=refused.append
            )

        await link.listen("_INBOX.bounds.*", publishes.on_ack)
        await link.flush()
        for _ in range(3):
            send()
        with pytest.raises(QueueFull):
            send()
        await until(lambda: len(refused) == 3)  # the broker's word that nobody listens
        send()
        await link.close()

    run(main())


async def fill(queue, body, refused):
    """Submits until that is refused at once; how many bytes were taken before."""
    for n in range(100):
        try:
            await submit(queue, body, refused)
        except (QueueUnavailable, QueueFull):
            return n * len(body)
    raise AssertionError("everything was taken")


def test_bounds_broker_that_stands_still(tmp_path):
    """A broker that takes nothing: items are given up in time, and what waits for it is bounded."""

    async def main():
        server = NatsServer(tmp_path)
        try:
            queue, refused = await opened(server, publish_timeout_s=limit_s(1.0)), []
            server.process.send_signal(signal.SIGSTOP)
            process = psutil.Process(server.process.pid)
            await until(lambda: process.status() == psutil.STATUS_STOPPED)
            await submit(queue, b"x", refused)
            await until(lambda: refused)
            assert isinstance(refused[0], QueueUnavailable)
            body = b"x" * 7_000_000
            taken = await fill(queue, body, refused)
            assert len(body) < taken < MAX_UNCONFIRMED_BYTES + 2 * PENDING_BYTES
            await until(lambda: len(refused) == 1 + taken // len(body))
        finally:
            server.stop()
        await queue.close()

    run(main())


def test_bounds_log_of_the_broker(tmp_path):
    """The embedded broker keeps a few log files of bounded size, however much it says."""
    server = EmbeddedServer(tmp_path, "token")
    command = server.command()
    file = tmp_path / "nats.conf"
    config = json.loads(file.read_text())
    most = config["logfile_max_num"]
    config |= {"logfile_size_limit": 4_000, "debug": True, "trace": True}
    file.write_text(json.dumps(config))
    process = subprocess.Popen(command)
    try:
        give_up = time.monotonic() + limit_s(20)
        while (address := server.address()) is None:
            assert time.monotonic() < give_up
            time.sleep(0.01)
        port = int(address.url.rpartition(":")[2])
        for _ in range(150):
            with socket.create_connection(("127.0.0.1", port)) as peer:
                peer.recv(2000)
                peer.sendall(b"PING\r\n" * 10)

        def files():
            return list(tmp_path.glob("nats.log*"))

        while len(files()) < 2:
            assert time.monotonic() < give_up
            time.sleep(0.01)
        assert len(files()) <= most + 1
    finally:
        process.kill()
        process.wait()
