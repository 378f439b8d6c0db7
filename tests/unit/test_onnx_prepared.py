"""The folders of prepared graphs under several processes, and where they cannot be used."""

from __future__ import annotations

import os
import threading

import pytest

from shoal.clock import wall
from shoal.runtimes.onnx import prepared

SIZE_BYTES = 100


def write(folder):
    """What `Session` would leave."""
    (folder / prepared.GRAPH).write_bytes(bytes(SIZE_BYTES // 2))
    (folder / prepared.DATA).write_bytes(bytes(SIZE_BYTES // 2))


def held_in(root):
    return sorted(path.name for path in root.iterdir())


def test_prepared_graphs_survive_writers_at_once(tmp_path, monkeypatch):
    """Eight that keep the same few graphs, over the bound, raise nothing and leave whole ones."""
    monkeypatch.setattr(prepared, "MAX_PREPARED_BYTES", 2 * SIZE_BYTES)
    barrier, faults = threading.Barrier(8), []

    def work(number):
        barrier.wait()
        try:
            for turn in range(30):
                prepared.make(tmp_path / "prepared" / "abcd"[(number + turn) % 4], write)
        except OSError as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    prepared.make(tmp_path / "prepared" / "last", write)
    names = held_in(tmp_path / "prepared")
    assert "last" in names
    assert len(names) <= 2
    assert not [name for name in names if name.startswith("part-")]


def test_prepared_graph_that_is_being_written_is_left_alone(tmp_path, monkeypatch):
    """Over the bound, what another process writes stays; what one that died left there goes."""
    monkeypatch.setattr(prepared, "MAX_PREPARED_BYTES", 2 * SIZE_BYTES)
    dead = tmp_path / "part-dead"
    dead.mkdir()
    write(dead)
    before_s = wall() - 2 * prepared._ABANDONED_S
    os.utime(dead, (before_s, before_s))

    def slowly(folder):
        write(folder)
        for name in "ab":
            prepared.make(tmp_path / name, write)
        assert held_in(tmp_path) == ["a", "b", folder.name]
        prepared.make(tmp_path / "c", write)
        assert held_in(tmp_path) == ["b", "c", folder.name]

    prepared.make(tmp_path / "slow", slowly)
    assert len(held_in(tmp_path)) == 2


def test_prepared_graph_takes_the_place_of_what_is_left_of_one(tmp_path):
    """A folder without its graph is nobody's; one that is whole stays as the first made it."""
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / prepared.DATA).write_bytes(b"half")
    assert prepared.find(folder) is None
    prepared.make(folder, write)
    (folder / "mark").touch()
    prepared.make(folder, write)
    assert held_in(folder) == [prepared.DATA, prepared.GRAPH, "mark"]
    assert held_in(tmp_path) == ["a"]


def test_prepared_graphs_need_no_folder(tmp_path, caplog):
    """Where nothing can be written, or even looked at, nothing is found, and that is said."""
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / ("a" * 300)):
        caplog.clear()
        prepared.make(root / "graph", write)
        assert "is not kept" in caplog.text
        assert prepared.find(root / "graph") is None
        prepared.forget(root / "graph")


def test_prepared_place_tells_weights_apart_by_name_and_content(tmp_path):
    """Names with a pattern's characters name only themselves; files that are away have no place."""
    file = tmp_path / "model[1].onnx"
    places = []
    for content in (b"1", b"22"):
        file.write_bytes(content)
        places.append(prepared.place(tmp_path, "graph", file))
    (tmp_path / "model1.onnx").touch()
    assert prepared.place(tmp_path, "graph", file) == places[1] != places[0]
    beside = tmp_path / "model[1].onnx_data"
    beside.symlink_to(tmp_path / "none")
    assert prepared.place(tmp_path, "graph", file) is None


@pytest.mark.parametrize("error", [OSError("full"), OSError(28, "No space left on device")])
def test_prepared_graph_that_cannot_be_written_leaves_nothing(tmp_path, error):
    """A write that fails half-way is undone."""

    def fail(folder):
        write(folder)
        raise error

    prepared.make(tmp_path / "a", fail)
    assert held_in(tmp_path) == []
