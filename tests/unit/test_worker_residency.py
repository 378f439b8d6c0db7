"""The rooms around the residency planner: sizes, memories, peers, demand, the roster, faults."""

from __future__ import annotations

import asyncio
import json

import msgspec
import psutil
import pytest

from shoal.bundles.shelf import Shelf
from shoal.catalog.estimate import UNKNOWN_MIB
from shoal.catalog.schema import Entry
from shoal.errors import (
    ModelUnavailable,
    OutOfMemory,
    RuntimeCrashed,
    RuntimeUnavailable,
    WeightsMissing,
)
from shoal.queue.interface import QueueLimits
from shoal.queue.memory import MemoryBroker, MemoryQueue
from shoal.wire.envelope import ModelState, Status, encode
from shoal.worker.demand import MAX_WISHES, WISH_S, DemandBook
from shoal.worker.faults import LOAD_CRASHES, LOADS_OUT_OF_MEMORY, LoadFaults, cool_down_s
from shoal.worker.fetches import MAX_FETCHES, Fetches
from shoal.worker.memory import GpuMemory, Memories, host_memory, resident_bytes
from shoal.worker.peers import MAX_PEERS, SILENT_S, Leases, Peers
from shoal.worker.roster import Roster
from shoal.worker.sizes import MAX_KEPT, SizeBook

MIB = 1024 * 1024
ENTRY = Entry(id="m", tasks=["encode"], source="file:///m", memory_mib=100)


def other(model, **fields):
    return msgspec.structs.replace(ENTRY, id=model, **fields)


def test_sizes_are_measured_smoothed_and_kept(tmp_path):
    """A size is the entry's guess, then what was measured, also in the next process's life."""
    book = SizeBook(tmp_path / "memory.json", "cpux1")
    assert book.size_bytes(ENTRY) == 100 * MIB
    book.on_loaded(ENTRY, 60 * MIB, 2.0)
    assert (book.size_bytes(ENTRY), book.load_s(ENTRY)) == (60 * MIB, 2.0)
    book.on_loaded(ENTRY, 40 * MIB, 1.0)
    assert 40 * MIB < book.size_bytes(ENTRY) < 60 * MIB
    book.save()
    again = SizeBook(tmp_path / "memory.json", "cpux1")
    assert again.size_bytes(ENTRY) == book.size_bytes(ENTRY)
    assert SizeBook(tmp_path / "memory.json", "cudax1").measured(ENTRY) is None


def test_sizes_are_guessed_by_the_weights_where_the_entry_says_nothing(tmp_path):
    """Five mebibytes of weights are a small model; weights that are not here are unknown."""
    (tmp_path / "model.safetensors").write_bytes(b"x" * (5 * MIB))
    book = SizeBook(tmp_path / "memory.json", "cpux1")
    entry = Entry(id="new", tasks=["encode"], source=f"file://{tmp_path}")
    assert 5 * MIB < book.size_bytes(entry) < 64 * MIB
    gone = msgspec.structs.replace(entry, id="gone", source=f"file://{tmp_path}/none")
    assert book.size_bytes(gone) == UNKNOWN_MIB * MIB


def test_sizes_grow_after_a_load_that_did_not_fit(tmp_path):
    """Every failed fit makes more room for the next try; a load that fits ends that."""
    book = SizeBook(tmp_path / "memory.json", "cpux1")
    book.on_loaded(ENTRY, 50 * MIB, 1.0)
    book.on_out_of_memory(ENTRY)
    first = book.size_bytes(ENTRY)
    book.on_out_of_memory(ENTRY)
    assert 50 * MIB < first < book.size_bytes(ENTRY)
    book.on_loaded(ENTRY, 50 * MIB, 1.0)
    assert book.size_bytes(ENTRY) == 50 * MIB


def test_sizes_of_failed_loads_are_forgotten_with_the_fault(tmp_path):
    """However often a model is tried and given up, it is as large as it was measured."""
    book, faults = SizeBook(tmp_path / "memory.json", "cpux1"), LoadFaults()
    book.on_loaded(ENTRY, 50 * MIB, 1.0)
    for _ in range(20):
        for _ in range(LOADS_OUT_OF_MEMORY):
            book.on_out_of_memory(ENTRY)
            fault = faults.on_out_of_memory(ENTRY, OutOfMemory("full"))
        assert fault is not None
        assert book.size_bytes(ENTRY) < 120 * MIB
        book.on_given_up(ENTRY)
        assert book.size_bytes(ENTRY) == 50 * MIB


def test_sizes_survive_a_broken_file(tmp_path):
    """A file that is no JSON is an estimate less, not an error."""
    (tmp_path / "memory.json").write_text("{")
    assert SizeBook(tmp_path / "memory.json", "cpux1").measured(ENTRY) is None


def test_bounds_sizes_kept(tmp_path):
    """Of more models than are kept, those that were loaded longest ago are forgotten."""
    book = SizeBook(tmp_path / "memory.json", "h")
    for n in range(MAX_KEPT + 3):
        book.on_loaded(other(f"m{n}"), MIB, 1.0)
    book.save()
    kept = json.loads((tmp_path / "memory.json").read_text())
    assert len(kept) == MAX_KEPT
    assert not any(key.startswith(("m0@", "m2@")) for key in kept)


def group(folder, limit, used, cached=0):
    folder.joinpath("memory.max").write_text(str(limit))
    folder.joinpath("memory.current").write_text(f"{used}\n")
    folder.joinpath("memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")
    return folder


def test_memory_is_what_the_control_group_allows(tmp_path):
    """In a container the limit of its group counts, and page cache in it is free."""
    found = host_memory(group(tmp_path, 1000 * MIB, 700 * MIB, cached=100 * MIB))
    assert (found.total_bytes, found.available_bytes) == (1000 * MIB, 400 * MIB)


@pytest.mark.parametrize("limit", ["max", "nonsense", 1 << 62])
def test_memory_without_a_limit_is_the_machines(tmp_path, limit):
    """No limit, or one above what the machine has, leaves the machine's own memory."""
    assert host_memory(group(tmp_path, limit, 1)).total_bytes == psutil.virtual_memory().total


def test_memories_share_the_host_and_part_the_gpus():
    """CPU devices have one memory together, each GPU its own."""
    memories = Memories(["cpu#0", "cpu#1", "cuda:0"], budget_mib=64, share=0.5)
    host, gpu = memories.state([])
    assert (host.name, host.devices, host.used_bytes) == ("host", ("cpu#0", "cpu#1"), 0)
    assert host.budget_bytes == 64 * MIB
    assert gpu.name == "cuda:0"
    memories.on_gpu("cuda:0", GpuMemory(total_bytes=100 * MIB, free_bytes=60 * MIB, held_bytes=20))
    _, gpu = memories.state([])
    assert (gpu.budget_bytes, gpu.used_bytes) == (55 * MIB + 20, 20)  # 5 MiB stay free


def test_memories_give_way_to_others():
    """A budget is never more than what others leave, however much the setting allows."""
    memories = Memories(["cpu#0"], budget_mib=1 << 30, share=1.0)
    (host,) = memories.state([])
    assert 0 < host.budget_bytes < psutil.virtual_memory().total


def test_resident_bytes_are_the_processes_own():
    """A process that lives has some, one that is gone has none."""
    me = psutil.Process().pid
    assert resident_bytes([me, 2**22 - 3]) >= 10 * MIB


def status(worker, draining=False, **states):
    models = [ModelState(model, state) for model, state in states.items()]
    return encode(Status(worker, models, draining=draining))


def test_peers_count_the_copies_of_live_workers():
    """Resident and loading models of others count; mine, silent and draining workers' do not."""
    now = [0.0]
    peers = Peers("me", clock=lambda: now[0])
    peers.on_status(status("me", m="resident"))
    assert peers.alone
    peers.on_status(status("a", m="resident", n="cold"))
    peers.on_status(status("b", m="loading"))
    assert peers.copies() == {"m": 2}
    peers.on_status(status("b", draining=True, m="resident"))
    assert peers.copies() == {"m": 1}
    now[0] = SILENT_S + 0.1
    assert (peers.alone, peers.copies()) == (True, {})
    peers.on_status(b"\xc1")
    assert peers.alone


def test_bounds_peers_known():
    """Of more workers than are kept, the one that was silent longest is forgotten."""
    peers = Peers("me", clock=lambda: 0.0)
    for n in range(MAX_PEERS + 1):
        peers.on_status(status(f"w{n}", m="resident"))
    assert peers.copies() == {"m": MAX_PEERS}
    assert "w0" not in peers._heard


def test_leases_are_held_by_as_many_workers_as_there_are_slots():
    """One slot, one worker, until it is released; two models do not share a slot."""

    async def main():
        broker = MemoryBroker(QueueLimits())
        a, b = (Leases(MemoryQueue(broker).leases, name) for name in "ab")
        first = await a.claim("m@1", 1)
        assert first is not None
        assert await b.claim("m@1", 1) is None
        assert await b.claim("n@1", 1) is not None
        second = await b.claim("m@1", 2)
        assert second is not None
        await a.renew(first)
        await a.release(first)
        assert await b.claim("m@1", 1) is not None

    asyncio.run(main())


def test_demand_adds_up_the_wait_for_models_that_are_not_here():
    """Item-seconds grow with what waits, end with its load, and are not counted for residents."""
    book = DemandBook()
    line = ("cold", "interactive")
    book.on_counts({line: 2, ("cold", "bulk"): 2, ("here", "bulk"): 9}, {"here"}, 10.0)
    assert (book.waiting["cold"], book.waited_s("cold")) == (4, 0.0)
    book.on_counts({line: 4, ("here", "bulk"): 9}, {"here"}, 11.0)
    assert book.waited_s("cold") == pytest.approx(4.0)
    assert book.waited_s("here") == 0.0
    book.on_counts({line: 4}, {"cold"}, 12.0)
    assert book.waited_s("cold") == 0.0


def test_demand_remembers_wishes_for_a_while():
    """An operator's wish holds until it is fulfilled or old; only so many are remembered."""
    book = DemandBook()
    book.wish("m", "here", 0.0)
    assert book.wished("m", WISH_S - 1) == "here"
    assert not book.wished("m", WISH_S + 1)
    book.fulfil("m")
    assert not book.wished("m", 0.0)
    for n in range(MAX_WISHES + 1):
        book.wish(f"m{n}", "somewhere", 0.0)
    assert not book.wished(f"m{MAX_WISHES}", 0.0)


def roster(why_not=lambda _: None):
    return Roster(["interactive", "bulk"], devices=1, window_items=8, why_not=why_not)


def test_roster_keeps_the_lines_of_an_earlier_revision_until_it_is_forgotten():
    """A new revision comes beside the old one, which goes when it is no longer retired."""
    new = other("m", revision="2")
    book = roster()
    assert [e.key for e in book.follow([ENTRY], []).added] == ["m@1"]
    change = book.follow([new], [ENTRY])
    assert ([e.key for e in change.added], change.gone) == (["m@2"], [])
    assert (set(book.entries), book.retired) == ({"m@1", "m@2"}, {"m@1"})
    assert len(book.lines_of("m@1")) == 2
    assert [e.key for e in book.follow([new], []).gone] == ["m@1"]
    assert book.lines_of("m@1") == []
    assert [e.key for e in book.follow([ENTRY], [new]).added] == ["m@1"]  # and back again


def test_roster_changes_policy_under_lines_that_stay():
    """Another weight changes the entry of the very same lines; the same catalog changes nothing."""
    book = roster()
    book.follow([ENTRY], [])
    line = book.lines_of("m@1")[0]
    heavier = other("m", weight=3.0)
    assert book.follow([heavier], []).changed == [heavier]
    assert line is book.lines_of("m@1")[0]
    assert line.entry.weight == 3.0
    change = book.follow([heavier], [])
    assert (change.added, change.changed, change.gone) == ([], [], [])


def test_roster_serves_later_what_it_could_not_at_first():
    """A model without its files has no lines; when they have come, it gets some."""
    missing = {"m@1"}
    book = roster(lambda entry: "no file" if entry.key in missing else None)
    book.follow([ENTRY], [])
    assert (book.unservable, book.servable()) == ({"m@1": "no file"}, [])
    assert book.servable_by_now() == []
    missing.clear()
    book.admit(book.servable_by_now())
    assert (book.unservable, len(book.lines_of("m@1"))) == ({}, 2)


def test_bounds_fetches_at_a_time(tmp_path):
    """A fetch more than may run begins when one has ended; given up, each ends with its reason."""

    async def main():
        ended = []
        shelf = Shelf(tmp_path / "bundles", [], may_build=False)
        fetches = Fetches(tmp_path, shelf, lambda entry, error: ended.append((entry.id, error)))
        entries = [other(f"m{n}") for n in range(MAX_FETCHES + 1)]  # of files that are not there
        for entry in entries:
            fetches.begin(entry)
        assert len(fetches.under_way) == MAX_FETCHES
        while len(ended) < MAX_FETCHES:
            await asyncio.sleep(0)
        fetches.begin(entries[-1])
        assert set(fetches.under_way) == {entries[-1].key}
        await fetches.close()
        assert all(isinstance(error, WeightsMissing) for _, error in ended)

    asyncio.run(main())


def test_faults_cool_down_by_kind():
    """What a person must mend is tried rarely, what comes by itself soon."""
    soon, later = cool_down_s(OutOfMemory("x")), cool_down_s(WeightsMissing("x"))
    assert soon < later < cool_down_s(ModelUnavailable("x")) < cool_down_s(RuntimeUnavailable("x"))


@pytest.mark.parametrize(
    ("tell", "error", "most"),
    [
        ("on_crash", RuntimeCrashed("gone"), LOAD_CRASHES),
        ("on_out_of_memory", OutOfMemory("full"), LOADS_OUT_OF_MEMORY),
    ],
)
def test_faults_blame_a_model_only_after_several_tries(tell, error, most):
    """One crash, or one load that did not fit, is tried again; several in a row are a fault."""
    faults = LoadFaults()
    for _ in range(most - 1):
        assert getattr(faults, tell)(ENTRY, error) is None
        assert faults.current("m@1") is None
    assert isinstance(getattr(faults, tell)(ENTRY, error), ModelUnavailable)
    assert faults.current("m@1").retry_after_s > 0
    faults.forgive("m@1")
    assert faults.current("m@1") is None
