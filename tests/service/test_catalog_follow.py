"""Processes that follow one catalog: what they see, what they pass over, what they remember."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from shoal.catalog.change import Record, difference, encode_record, shelf_key
from shoal.catalog.follow import Following
from shoal.catalog.load import load
from shoal.catalog.schema import Adapter, Entry, Output
from shoal.catalog.seed import join, mirror, read_records, write
from shoal.errors import CatalogError, QueueUnavailable
from shoal.queue.interface import QueueLimits
from shoal.queue.jetstream import JetStreamQueue
from shoal.queue.memory import MemoryBroker, MemoryQueue
from shoal.queue.topology import Topology
from tests.conftest import NatsServer, run, until
from tests.support.pace import limit_s


def _entry(name="a", **more):
    plain = {"tasks": ["encode"], "source": "file:///w", "outputs": {"dense": Output(8)}}
    return Entry(id=name, **(plain | more))


async def _put(shelf, entry, origin="command"):
    await shelf.put(shelf_key(entry.id), encode_record(Record(entry, origin)))


async def _queue(server, storage="file"):
    topology = Topology("default", storage, 1, QueueLimits(), ("interactive",))
    return await JetStreamQueue.open(server.address, topology, name="test")


@pytest.fixture(params=["memory", "jetstream"])
def shelves(request, tmp_path):
    """Opens one empty shelf as two processes have it."""

    @asynccontextmanager
    async def opened():
        server = NatsServer(tmp_path) if request.param == "jetstream" else None
        broker = MemoryBroker(QueueLimits())
        queues = [await _queue(server) if server else MemoryQueue(broker) for _ in range(2)]
        try:
            yield [queue.catalog for queue in queues]
        finally:
            for queue in queues:
                await queue.close()
            if server:
                server.stop()

    return opened


async def _following(shelf):
    snapshots = []
    following = Following(shelf, on_change=snapshots.append)
    await following.start()
    return following, snapshots


def _keys(following):
    return [entry.key for entry in following.snapshot.entries]


def test_catalog_is_followed_by_every_process(shelves):
    """What one writes two others soon have, the same; the first call has all of it."""

    async def main():
        async with shelves() as (a, b):
            await _put(a, _entry("one"))
            await _put(a, _entry("org/two.x", pool="other"))
            (first, told), (second, _) = await _following(a), await _following(b)
            assert [len(snapshot) for snapshot in told] == [2]
            assert [entry.id for entry in first.entries("other")] == ["org/two.x"]
            await _put(b, _entry("one", revision="2"))
            await b.remove(shelf_key("org/two.x"))
            await _put(b, _entry("three"))
            for following in (first, second):
                await until(lambda f=following: _keys(f) == ["one@2", "three@1"])
            assert told[-1] is first.snapshot

    run(main())


def test_catalog_bad_record_harms_nothing(shelves):
    """A record that cannot be read is passed over with its reason.

    Its last version that can be read counts, also for a process that starts later.
    """

    async def main():
        async with shelves() as (a, b):
            await _put(a, _entry("one"))
            early, _ = await _following(a)
            await a.put("one", b'{"entry": {"id": "one", "newer": 1}, "origin": "command"}')
            await a.put("junk", b"\xff")
            await _put(a, _entry("two"))
            await until(lambda: _keys(early) == ["one@1", "two@1"])
            late, _ = await _following(b)
            for following in (early, late):
                assert _keys(following) == ["one@1", "two@1"]
                assert following.faults.keys() == {"one", "junk"}
                assert "unknown key `newer`" in following.faults["one"]
            await _put(a, _entry("one", revision="2"))
            await a.remove("junk")
            await until(lambda: not (early.faults or late.faults))
            assert _keys(early) == _keys(late) == ["one@2", "two@1"]

    run(main())


def test_catalog_name_that_two_have_is_the_earlier_ones_everywhere(shelves):
    """Of two records with one name every process leaves out the same one, until it is free."""

    async def main():
        async with shelves() as (a, b):
            early, _ = await _following(a)
            await _put(a, _entry("z", aliases=["name"]))
            await _put(a, _entry("b", aliases=["name"]))
            await until(lambda: early.faults)
            late, _ = await _following(b)
            for following in (early, late):
                assert _keys(following) == ["z@1"]
                assert "`name` is taken by `z`" in following.faults["b"]
            await b.remove("z")
            await until(lambda: _keys(early) == _keys(late) == ["b@1"])

    run(main())


def test_catalog_remembers_what_was_replaced(shelves):
    """Earlier revisions and removed models are retired, also for a process that starts later.

    What comes back, or changes a live field only, is not.
    """

    async def main():
        async with shelves() as (a, b):
            for entry in (_entry("a"), _entry("b"), _entry("c"), _entry("d"), _entry("e")):
                await _put(a, entry)
            early, _ = await _following(a)
            assert early.retired("default") == []
            await _put(a, _entry("a", revision="2"))
            await a.remove("b")
            await _put(a, _entry("c", pinned=True))
            await a.remove("d")
            await _put(a, _entry("d"))
            await _put(a, _entry("e", pool="other"))
            await until(lambda: early.entries("other"))
            late, _ = await _following(b)
            await late.recall()
            for following in (early, late):
                assert [e.key for e in following.retired("default")] == ["e@1", "b@1", "a@1"]
                assert following.retired("other") == []

    run(main())


def test_catalog_knows_adapters_by_key_and_remembers_replaced_ones(shelves, monkeypatch):
    """An adapter's key is known while it is there, and for a while after; so are late comers.

    One whose model is not there is a fault until the model comes.
    """

    def _adapter(**more):
        return Adapter(name="x", base="a", source="file:///x", **more)

    async def main():
        async with shelves() as (a, b):
            await _put(a, _adapter())
            early, _ = await _following(a)
            assert "no model of the catalog has the id `a`" in early.faults["a=40x"]
            await _put(a, _entry("a"))
            await until(lambda: early.has_adapters("a"))
            assert not early.faults
            assert early.adapter("a@x@1") == _adapter()
            await _put(a, _adapter(revision="2"))
            await until(lambda: early.adapter("a@x@2"))
            late, _ = await _following(b)
            await late.recall()
            for following in (early, late):
                assert following.snapshot.find("a@x").adapter.revision == "2"
                assert following.adapter("a@x@1") == _adapter()
                assert following.adapter("a@x@3") is None
                assert following.retired("default") == []
            await a.remove("a=40x")
            await until(lambda: not (early.has_adapters("a") or late.has_adapters("a")))
            assert early.adapter("a@x@2") is not None
            monkeypatch.setattr("shoal.catalog.follow.RETIRED_S", 0.0)
            assert early.adapter("a@x@2") is None

    run(main())


def test_catalog_forgets_what_was_replaced_long_ago(shelves, monkeypatch):
    """A retired entry is told for a bounded time only."""

    async def main():
        async with shelves() as (a, _):
            await _put(a, _entry("a"))
            following, _ = await _following(a)
            await _put(a, _entry("a", revision="2"))
            await until(lambda: following.retired("default"))
            monkeypatch.setattr("shoal.catalog.follow.RETIRED_S", 0.05)
            await until(lambda: not following.retired("default"))

    run(main())


def test_catalog_is_seeded_once(shelves, tmp_path, caplog):
    """Two that start at once fill an empty shelf; one with another folder says so and follows.

    What was removed stays so.
    """

    async def main():
        async with shelves() as (a, b):
            await asyncio.gather(join(a, None), join(b, None))
            wanted = {entry.id: entry for entry in load(None).entries}
            records = await read_records(b)
            assert {name: record.entry for name, (record, _) in records.items()} == wanted
            assert {record.origin for record, _ in records.values()} == {"folder"}
            for name in wanted:
                assert len(await a.versions(shelf_key(name))) == 1
            folder = tmp_path / "mine"
            folder.mkdir()
            (folder / "m.yaml").write_text(
                "id: mine\ntasks: [encode]\nsource: file:///w\noutputs: {dense: {dim: 8}}\n"
            )
            with caplog.at_level(logging.WARNING):
                await join(a, None)
                assert not caplog.records
                await join(b, folder)
            assert "differ in mine" in caplog.text
            assert (await read_records(a)).keys() == wanted.keys()
            for name in wanted:
                await a.remove(shelf_key(name))
            await join(a, None)
            assert await a.read() == []

    run(main())


def test_catalog_mirrors_a_folder(shelves, caplog):
    """What came from a folder is made equal to it, with any revision.

    What a command wrote stays, and its names with it.
    """

    async def main():
        async with shelves() as (a, b):
            await mirror(a, [_entry("same"), _entry("old"), _entry("changed"), _entry("pinned")])
            await _put(b, _entry("pinned", pinned=True, aliases=["name"]))
            await _put(b, _entry("added"))
            before = {r.key: r.revision for r in await a.read()}
            await mirror(
                a,
                [
                    _entry("same"),
                    _entry("changed", source="file:///other"),
                    _entry("pinned"),
                    _entry("taker", aliases=["name"]),
                    _entry("new"),
                ],
            )
            records = {name: record for name, (record, _) in (await read_records(b)).items()}
            assert records.keys() == {"same", "changed", "pinned", "added", "new"}
            assert records["changed"].entry.source == "file:///other"
            assert records["pinned"].entry.pinned
            assert {n for n, r in records.items() if r.origin == "command"} == {"pinned", "added"}
            after = {r.key: r.revision for r in await a.read()}
            assert {name for name in after if after[name] == before.get(name)} == {
                "same",
                "pinned",
                "added",
            }
            assert "`name` is taken by `pinned`" in caplog.text
            assert "`pinned` stays as a command wrote it" in caplog.text

    run(main())


def test_catalog_change_by_another_meanwhile_is_not_overwritten(shelves):
    """Changes that were checked against what is no longer there are refused, of every kind."""

    async def main():
        async with shelves() as (a, b):
            await _put(a, _entry("a"))
            seen = {name: revision for name, (_, revision) in (await read_records(a)).items()}
            await _put(b, _entry("a", weight=2.0))
            await _put(b, _entry("b"))
            for wanted in ([_entry("a", weight=3.0)], [], [_entry("a"), _entry("b", weight=2.0)]):
                with pytest.raises(CatalogError, match="someone else"):
                    await write(a, difference(wanted, [_entry("a")]), "command", seen)
            seen = {name: revision for name, (_, revision) in (await read_records(a)).items()}
            present = [_entry("a", weight=2.0), _entry("b")]
            await write(a, difference([_entry("a", weight=3.0)], present), "command", seen)
            records = await read_records(b)
            assert [record.entry.weight for record, _ in records.values()] == [3.0]

    run(main())


async def _known(queue):
    """What its catalog holds; nothing while the broker is not back."""
    try:
        return await queue.catalog.read()
    except QueueUnavailable:
        return None


def test_catalog_survives_a_broker_that_forgets(tmp_path):
    """A broker that kept it in memory gets it back from who follows it.

    What was removed does not come back, and what comes next is followed.
    """

    async def main():
        server = NatsServer(tmp_path)
        queues = a, b = [await _queue(server, "memory") for _ in range(2)]
        try:
            for name in ("kept", "gone"):
                await _put(a.catalog, _entry(name))
            await a.catalog.remove("gone")
            followings = []
            for queue in queues:
                following, _ = await _following(queue.catalog)
                queue.when_back(following.restore)
                followings.append(following)
            server.stop()
            await until(lambda: not (a.connected or b.connected))
            await asyncio.to_thread(server.start)
            async with asyncio.timeout(limit_s(10)):
                while not (await _known(a) and await _known(b)):
                    await asyncio.sleep(0.05)
            assert (await read_records(b.catalog)).keys() == {"kept"}
            await _put(a.catalog, replace(_entry("kept"), revision="2"))
            await until(lambda: all(_keys(f) == ["kept@2"] for f in followings))
        finally:
            for queue in queues:
                await queue.close()
            server.stop()

    run(main())
