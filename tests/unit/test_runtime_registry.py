"""Finding runtimes by name, and the runtime that has no model."""

from __future__ import annotations

import numpy as np
import psutil
import pytest

from shoal.errors import (
    InvalidRequest,
    ModelUnavailable,
    RunFailed,
    RuntimeUnavailable,
    WeightsMissing,
)
from shoal.ipc.messages import ModelSpec, RunItem
from shoal.runtimes import registry
from shoal.runtimes.null import numbers
from shoal.wire.envelope import Params


def null_with(**options):
    runtime = registry.create("null", "cpu", 1)
    runtime.load(ModelSpec("m@1", "", "", ["encode", "score", "classify"], options=options))
    return runtime


def vectors(outcome, name="dense"):
    found = outcome.arrays[name]
    return np.frombuffer(found.data, found.dtype).reshape(found.shape)


def encode(name, *texts, **fields):
    return RunItem(name, "encode", [1] * len(texts), texts=list(texts), **fields)


def test_the_shipped_runtimes_are_registered():
    """Names come from the entry points of the installed package."""
    assert {"null", "onnx", "torch"} <= set(registry.names())
    assert registry.available("null") is None


def test_an_unknown_name_suggests_near_ones():
    """A slip of the pen is answered with what was meant, anything else with all names."""
    with pytest.raises(RuntimeUnavailable, match="did you mean torch"):
        registry.available("troch")
    with pytest.raises(RuntimeUnavailable, match=r"known: .*null, onnx, .*torch"):
        registry.create("xyz", "cpu", 1)


def test_a_missing_library_is_named_with_its_cure(monkeypatch):
    """The reason says what is missing and how to install it, and `create` raises it."""
    factory = type(registry.create("null", "cpu", 1))
    monkeypatch.setattr(factory, "needs", {"no_such_lib": "pip install it"}, raising=False)
    assert registry.available("null") == (
        "runtime 'null': no_such_lib is not installed: pip install it"
    )
    with pytest.raises(RuntimeUnavailable, match="pip install it"):
        registry.create("null", "cpu", 1)


def test_null_vectors_follow_each_text_alone():
    """Every text has its own vector, the same in any batch, so crossed answers are seen."""
    texts = [f"text {n}" for n in range(50)]
    ran = null_with(dim=6).run("m@1", [encode(str(n), text) for n, text in enumerate(texts)])
    rows = np.concatenate([vectors(outcome) for outcome in ran.outcomes])
    assert np.array_equal(rows, numbers(texts, 6))
    assert len({row.tobytes() for row in rows}) == 50
    assert np.abs(rows).max() <= 1


def test_null_scores_and_classes_follow_the_pair():
    """`shared` scores each document with the query; `pairs` classifies each pair."""
    runtime = null_with(labels="a, b, c")
    score = RunItem("i", "score", [1] * 3, "shared", texts=["q", "d", "e"])
    swapped = RunItem("i", "score", [1] * 3, "shared", texts=["d", "q", "e"])
    pairs = RunItem("i", "classify", [1] * 4, "pairs", texts=["q", "d", "q", "e"])
    one, other, classes = runtime.run("m@1", [score, swapped, pairs]).outcomes
    assert vectors(one, "scores").shape == (2,)
    assert vectors(one, "scores")[0] != vectors(other, "scores")[0]
    assert classes.labels == ["a", "b", "c"]
    assert vectors(classes, "scores").sum(axis=1) == pytest.approx([1, 1])


def test_null_faults_are_those_that_were_asked_for():
    """`poison` loses the whole batch, `nan` its own item alone."""
    runtime = null_with(poison="bad", nan="odd")
    with pytest.raises(RunFailed):
        runtime.run("m@1", [encode("a", "good"), encode("b", "bad")])
    good, odd = runtime.run("m@1", [encode("a", "good"), encode("b", "fine", "odd")]).outcomes
    assert vectors(good).shape == (1, 8)
    assert isinstance(odd, RunFailed)
    assert odd.input_index == 1


def test_null_gives_the_outputs_that_were_asked_for():
    """Sparse vectors in their three arrays, fewer dimensions, and an unknown output refused."""
    runtime = null_with(dim=4)
    both = encode("a", "x", "y", params=Params(outputs=["sparse", "dense"], dimensions=3))
    unknown = encode("b", "x", params=Params(outputs=["colbert"]))
    result, refused = runtime.run("m@1", [both, unknown]).outcomes
    assert vectors(result, "sparse_counts").tolist() == [4, 4]
    assert vectors(result, "sparse_values").shape == vectors(result, "sparse_indices").shape
    assert vectors(result).shape == (2, 3)
    assert isinstance(refused, InvalidRequest)


def test_null_runs_only_what_is_loaded():
    """After unload, and under another key, there is nothing to run."""
    runtime = null_with()
    with pytest.raises(ModelUnavailable):
        runtime.run("other@1", [encode("a", "x")])
    runtime.unload("m@1")
    with pytest.raises(ModelUnavailable):
        runtime.run("m@1", [encode("a", "x")])
    assert runtime.memory() == {}


def test_null_holds_the_memory_it_was_told_to():
    """`mib` is resident while the model is loaded, and gone at once when it is not."""
    process, held_bytes = psutil.Process(), 64 * 2**20
    before_bytes = process.memory_info().rss
    runtime = null_with(mib=64)
    assert runtime.memory() == {"m@1": held_bytes}
    assert process.memory_info().rss - before_bytes > 0.9 * held_bytes
    runtime.unload("m@1")
    assert process.memory_info().rss - before_bytes < 0.1 * held_bytes


def test_null_loads_fail_as_they_were_told_to():
    """Each kind of failure is the error that a real load raises; with a number, it passes."""
    for kind, error in (
        ("oom", MemoryError),
        ("missing", WeightsMissing),
        ("config", ModelUnavailable),
        ("typing-error", ModelUnavailable),
    ):
        with pytest.raises(error):
            null_with(load_fails=kind)
    runtime = registry.create("null", "cpu", 1)
    spec = ModelSpec("m@1", "", "", ["encode"], options={"load_fails": "oom:2"})
    for _ in range(2):
        with pytest.raises(MemoryError):
            runtime.load(spec)
        assert runtime.memory() == {}
    runtime.load(spec)
    assert runtime.memory() == {"m@1": 0}
