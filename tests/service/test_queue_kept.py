"""The contract of kept records, on every implementation of the queue."""

from __future__ import annotations

import asyncio
import math
import uuid
from contextlib import asynccontextmanager

import pytest

from shoal.errors import QueueUnavailable
from shoal.queue.interface import QueueLimits
from shoal.queue.jetstream import JetStreamQueue
from shoal.queue.memory import MemoryBroker, MemoryQueue
from shoal.queue.topology import Topology
from tests.conftest import NatsServer, run, until
from tests.support.pace import limit_s

LIMITS = QueueLimits(kept_max_bytes=64 * 1024, leases_max_bytes=64 * 1024)


@pytest.fixture(params=["memory", "jetstream"])
def stores(request):
    """Opens the kept records of one fresh pool, as two processes have them."""
    server = request.getfixturevalue("nats_server") if request.param == "jetstream" else None

    @asynccontextmanager
    async def opened(which="kept"):
        if server is None:
            broker = MemoryBroker(LIMITS)
            queues = [MemoryQueue(broker) for _ in range(2)]
        else:
            topology = Topology(f"t{uuid.uuid4().hex[:8]}", "file", 1, LIMITS, ("interactive",))
            queues = [
                await JetStreamQueue.open(server.address, topology, name="test") for _ in range(2)
            ]
        try:
            yield [getattr(queue, which) for queue in queues]
        finally:
            for queue in queues:
                await queue.close()

    return opened


def test_kept_key_is_claimed_by_one(stores):
    """Of many that claim a key at once exactly one gets it; all read the same record."""

    async def main():
        async with stores() as (a, b):
            claims = [store.claim("key", b"%d" % n, 30) for n in range(10) for store in (a, b)]
            revisions = await asyncio.gather(*claims)
            won = [n for n, revision in enumerate(revisions) if revision is not None]
            assert len(won) == 1
            record = await b.get("key")
            assert (record.data, record.revision) == (b"%d" % (won[0] // 2), revisions[won[0]])
            assert await a.get("other") is None

    run(main())


def test_kept_record_is_replaced_by_its_holder_only(stores):
    """A replacement names the revision that it replaces; a late one changes nothing."""

    async def main():
        async with stores() as (a, b):
            first = await a.claim("key", b"first", 30)
            second = await b.replace("key", b"second", 30, first)
            assert second is not None
            assert await a.replace("key", b"late", 30, first) is None
            assert (await a.get("key")).data == b"second"

    run(main())


def test_kept_record_is_deleted_by_its_holder_only(stores):
    """A delete names the revision; afterwards the key can be claimed anew."""

    async def main():
        async with stores() as (a, b):
            first = await a.claim("key", b"first", 30)
            second = await a.replace("key", b"second", 30, first)
            await b.delete("key", first)
            assert (await a.get("key")).data == b"second"
            await b.delete("key", second)
            assert await a.get("key") is None
            await b.delete("key", second)
            assert await a.claim("key", b"again", 30) is not None

    run(main())


def test_kept_leases_are_records_of_their_own(stores):
    """A lease is claimed by one of two, and takes no name of a kept answer."""

    async def main():
        async with stores("leases") as (a, b), stores("kept") as (kept, _):
            revision = await a.claim("key", b"mine", 30)
            assert await b.claim("key", b"too late", 30) is None
            assert await kept.get("key") is None
            await a.delete("key", revision)
            assert await b.claim("key", b"now", 30) is not None

    run(main())


@pytest.mark.slow
def test_kept_record_expires_by_its_own_time(stores):
    """A record is gone after its time, and its key is free; a replacement has a time of its own."""

    async def main():
        async with stores() as (a, b):
            ttl_s = math.ceil(limit_s(1))
            revision = await a.claim("long", b"x", ttl_s)
            await a.replace("long", b"y", math.ceil(limit_s(30)), revision)
            await a.claim("short", b"x", ttl_s)
            async with asyncio.timeout(limit_s(10)):
                while await b.get("short") is not None:
                    await asyncio.sleep(0.1)
            assert (await b.get("long")).data == b"y"
            assert await b.claim("short", b"again", 30) is not None

    run(main())


@pytest.mark.parametrize("which", ["kept", "leases"])
def test_kept_store_is_bounded_and_refuses_rather_than_forgets(stores, which):
    """Past its bound the store takes no more, and what it holds stays."""

    async def main():
        async with stores(which) as (a, _):
            with pytest.raises(QueueUnavailable):  # noqa: PT012 how many fit is the store's own
                for n in range(70):
                    await a.claim(f"key-{n}", b"x" * 1024, 30)
            assert n > 30
            assert (await a.get("key-0")).data == b"x" * 1024

    run(main())


@pytest.mark.slow
def test_kept_store_that_is_away_refuses_at_once(tmp_path):
    """Without its broker the store raises at once instead of waiting."""

    async def main():
        server = NatsServer(tmp_path)
        topology = Topology("away", "file", 1, LIMITS, ("interactive",))
        queue = await JetStreamQueue.open(server.address, topology, name="test")
        server.stop()
        await until(lambda: not queue.connected)
        async with asyncio.timeout(limit_s(3)):
            with pytest.raises(QueueUnavailable):
                await queue.kept.claim("key", b"x", 30)
            with pytest.raises(QueueUnavailable):
                await queue.kept.get("key")
        await queue.close()

    run(main())
