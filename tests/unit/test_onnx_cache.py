"""The cache of derived graphs under several writers."""

from __future__ import annotations

import threading

from shoal.runtimes.onnx.cache import cached


def test_many_writers_leave_one_whole_file(tmp_path):
    """Eight threads that start at once all get the graph, and no half-written file stays."""
    barrier = threading.Barrier(8)
    got = []

    def work():
        barrier.wait()
        got.append(cached(tmp_path / "new", "encoder", "shape", lambda: b"graph" * 10_000))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [b"graph" * 10_000] * 8
    (path,) = (tmp_path / "new").iterdir()
    assert path.suffix == ".graph"


def test_what_a_graph_depends_on_names_its_file(tmp_path):
    """Another shape or another kind is another file; the same is not built again."""
    assert cached(tmp_path, "encoder", "a", lambda: b"1") == b"1"
    assert cached(tmp_path, "encoder", "b", lambda: b"2") == b"2"
    assert cached(tmp_path, "vocabulary", "a", lambda: b"3") == b"3"
    assert cached(tmp_path, "encoder", "a", lambda: b"not this") == b"1"
