"""A broker without room for more: what it refuses, and that it recovers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import uuid

import pytest

from shoal.errors import QueueFull
from shoal.queue.connection import Address
from shoal.queue.interface import QueueLimits
from shoal.queue.jetstream import JetStreamQueue
from shoal.queue.server import find_binary
from shoal.queue.topology import Topology
from tests.conftest import run, until
from tests.support.pace import limit_s

MIB = 1024**2
LIMITS = QueueLimits(
    payload_max_bytes=MIB // 2,
    answers_max_bytes=MIB // 2,
    dead_max_bytes=MIB // 4,
    kept_max_bytes=MIB // 4,
    untouched_max_bytes=MIB // 4,
    catalog_max_bytes=MIB // 4,
    catalog_max_record_bytes=MIB // 8,
    max_queued_bytes=MIB,
)
ITEM = b"x" * (100 * 1024)


@pytest.fixture
def small_broker(tmp_path):
    """A nats-server that may store four mebibytes on disk."""
    config = {
        "listen": "127.0.0.1:-1",
        "jetstream": {"store_dir": str(tmp_path), "max_file_store": 4 * MIB},
        "ports_file_dir": str(tmp_path),
        "logfile": str(tmp_path / "nats.log"),
    }
    (tmp_path / "nats.conf").write_text(json.dumps(config))
    process = subprocess.Popen([find_binary(), "-c", str(tmp_path / "nats.conf")])
    yield tmp_path
    process.kill()
    process.wait()


async def address_of(folder):
    await until(lambda: list(folder.glob("*.ports")))
    [file] = folder.glob("*.ports")
    await until(file.read_text)
    return Address(json.loads(file.read_text())["nats"][0])


@pytest.mark.slow
def test_faults_disk_that_is_full_refuses_and_recovers(small_broker):
    """What has no room is a 429; what was stored is delivered and makes room again."""

    async def main():
        topology = Topology("small", "file", 1, LIMITS, ("interactive",))
        queue = await JetStreamQueue.open(await address_of(small_broker), topology, name="test")
        refused, got = [], []

        async def submit():
            await queue.submit(
                "m",
                "interactive",
                ITEM,
                item_id=uuid.uuid4().hex,
                ttl_s=60,
                on_refused=refused.append,
            )

        count = 60
        for _ in range(count):
            await submit()
        ended = asyncio.Event()
        await queue.pull(
            "m",
            "interactive",
            max_items=count,
            expires_s=limit_s(1.5),
            on_delivery=got.append,
            on_end=ended.set,
        )
        await until(lambda: len(got) + len(refused) == count)
        await ended.wait()
        assert {type(error) for error in refused} == {QueueFull}
        assert len(got) > 5
        for delivery in got:
            assert delivery.data == ITEM
            await delivery.ack()
        await queue._link.flush()
        async with asyncio.timeout(limit_s(10)):
            while refused:  # the broker counts what it gave up a moment later
                refused.clear()
                await submit()
                await asyncio.sleep(0.2)
        await queue.close()

    run(main())
