"""The contract of the shelf, on every implementation of the queue, and over a killed broker."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import asynccontextmanager

import pytest

from shoal.clock import wall
from shoal.errors import QueueUnavailable
from shoal.queue.interface import QueueLimits
from shoal.queue.jetstream import JetStreamQueue
from shoal.queue.memory import MemoryBroker, MemoryQueue
from shoal.queue.topology import CATALOG_VERSIONS, Topology
from tests.conftest import NatsServer, run, until

LIMITS = QueueLimits(catalog_max_bytes=256 * 1024, catalog_max_record_bytes=16 * 1024)


async def _open(server, storage="file"):
    pool = f"t{uuid.uuid4().hex[:8]}"
    topology = Topology(pool, storage, 1, LIMITS, ("interactive",))
    return await JetStreamQueue.open(server.address, topology, name="test")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A broker of this module's own: a shelf is of all its pools."""
    server = NatsServer(tmp_path_factory.mktemp("shelf"))
    yield server
    server.stop()


@pytest.fixture(params=["memory", "jetstream"])
def shelves(request):
    """Opens one shelf as two processes have it, and a key nobody used."""
    server = request.getfixturevalue("server") if request.param == "jetstream" else None

    @asynccontextmanager
    async def opened():
        if server is None:
            broker = MemoryBroker(LIMITS)
            queues = [MemoryQueue(broker) for _ in range(2)]
        else:
            queues = [await _open(server) for _ in range(2)]
        try:
            yield [queue.catalog for queue in queues]
        finally:
            for queue in queues:
                await queue.close()

    return opened


def _new_key():
    return f"org/some=2Emodel-{uuid.uuid4().hex[:8]}"


async def _read(shelf, key):
    found = [record for record in await shelf.read() if record.key == key]
    assert len(found) < 2
    return found[0] if found else None


def test_shelf_keeps_the_versions_of_a_record(shelves):
    """A record is what was written last; a bounded number of versions and removals stays."""

    async def main():
        async with shelves() as (a, b):
            key, begun_s = _new_key(), wall()
            assert (await _read(b, key), await b.versions(key)) == (None, [])
            first = await a.put(key, b"one")
            second = await b.put(key, b"two")
            assert second > first
            newest = await _read(a, key)
            assert (newest.data, newest.revision) == (b"two", second)
            assert begun_s - 1 < newest.at_s < wall() + 1
            assert await b.remove(key)
            assert await _read(a, key) is None
            third = await a.put(key, b"three")
            versions = await b.versions(key)
            assert [v.data for v in versions] == [b"one", b"two", None, b"three"]
            assert [v.key for v in versions] == [key] * 4
            revisions = [v.revision for v in versions]
            assert revisions == sorted(revisions)
            assert (revisions[0], revisions[-1]) == (first, third)
            for n in range(CATALOG_VERSIONS):
                await a.put(key, b"%d" % n)
            assert [v.data for v in await b.versions(key)] == [
                b"%d" % n for n in range(CATALOG_VERSIONS)
            ]

    run(main())


def test_shelf_writes_only_over_the_version_that_was_seen(shelves):
    """Of many that write over one version one does; 0 stands for none, also for a removed one."""

    async def main():
        async with shelves() as (a, b):
            key = _new_key()
            tries = [shelf.put(key, b"%d" % n, 0) for n in range(5) for shelf in (a, b)]
            won = [revision for revision in await asyncio.gather(*tries) if revision is not None]
            assert len(won) == 1
            second = await a.put(key, b"second", won[0])
            assert second is not None
            assert await b.put(key, b"late", won[0]) is None
            assert not await b.remove(key, won[0])
            assert (await _read(b, key)).data == b"second"
            assert await b.remove(key, second)
            assert not await b.remove(key)
            assert await a.put(key, b"late", second) is None
            assert await a.put(key, b"again", 0) is not None
            assert await a.put(key, b"late", 0) is None

    run(main())


def test_shelf_is_followed_from_what_is_there(shelves):
    """A follower is told what is there, then in a second what others write, once and in order."""

    async def main():
        async with shelves() as (a, b):
            key, gone, late = _new_key(), _new_key(), _new_key()
            await a.put(key, b"old")
            await a.put(key, b"new")
            await a.put(gone, b"x")
            await a.remove(gone)
            told = []
            await b.follow(told.append)
            assert [r.data for r in told if r.key == key] == [b"new"]
            assert [r.data for r in told if r.key == gone] == [None]
            for n in range(3):
                await a.put(late, b"%d" % n)
            await a.remove(late)
            want = [b"0", b"1", b"2", None]
            await until(lambda: [r.data for r in told if r.key == late] == want, 1)
            assert len({(r.key, r.revision) for r in told}) == len(told)

    run(main())


def test_shelf_is_bounded(shelves):
    """A record that is too large is refused, as is one more on a full shelf; the others stay."""

    async def main():
        async with shelves() as (a, _):
            key, most = _new_key(), LIMITS.catalog_max_record_bytes
            with pytest.raises(QueueUnavailable):
                await a.put(key, b"x" * (most + 1))
            await a.put(key, b"first")
            keys = [_new_key() for _ in range(LIMITS.catalog_max_bytes // most + 1)]
            with pytest.raises(QueueUnavailable):  # noqa: PT012 how many fit is the store's own
                for each in keys:
                    await a.put(each, b"x" * (most - 512))
            assert (await _read(a, key)).data == b"first"

    run(main())


@pytest.mark.parametrize("storage", ["file", "memory"])
def test_shelf_is_followed_over_a_killed_broker(tmp_path, storage):
    """A killed broker's followers hear of the next version in a second, be its memory lost."""

    async def main():
        server = NatsServer(tmp_path)
        queues = a, b = [await _open(server, storage) for _ in range(2)]
        try:
            for n in range(3):
                await a.catalog.put("key", b"%d" % n)
            told = []
            await b.catalog.follow(told.append)
            assert [r.data for r in told] == [b"2"]
            server.stop()
            await until(lambda: not (a.connected or b.connected))
            with pytest.raises(QueueUnavailable):
                await a.catalog.read()
            back = []

            async def on_back():
                back.append(True)

            for queue in queues:
                queue.when_back(on_back)
            await asyncio.to_thread(server.start)
            await until(lambda: len(back) == 2, 10)
            assert len(await a.catalog.read()) == (1 if storage == "file" else 0)
            await a.catalog.put("key", b"after")
            await until(lambda: told[-1].data == b"after", 1)
            assert len(told) == 2
        finally:
            for queue in queues:
                await queue.close()
            server.stop()

    run(main())


@pytest.mark.slow
def test_shelf_follower_whose_reader_the_broker_forgot_reads_again(tmp_path):
    """A broker that no longer knows a follower, on a connection that stays, is noticed."""

    async def main():
        server = NatsServer(tmp_path)
        a, b = await _open(server), await _open(server)
        try:
            told = []
            await b.catalog.follow(told.append)
            for consumer in await a._js.consumers_info("KV_shoal-catalog"):
                await a._js.delete_consumer("KV_shoal-catalog", consumer.name)
            await a.catalog.put("key", b"unseen")
            await until(lambda: [r.data for r in told] == [b"unseen"], 12)
        finally:
            await a.close()
            await b.close()
            server.stop()

    run(main())
