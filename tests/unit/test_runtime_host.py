"""The host of a runtime: second tries, and a culprit alone."""

from __future__ import annotations

import errno
import subprocess
import sys

import numpy as np
import pytest

from shoal.errors import OutOfMemory, RunFailed, ShoalError
from shoal.ipc.messages import AskMemory, Failed, Load, ModelSpec, Run, RunItem, Traits, Unload
from shoal.runtimes import registry
from shoal.runtimes.host import Host
from shoal.runtimes.interface import RanItems
from shoal.wire.arrays import Array
from shoal.wire.envelope import Params, Result, decode_result

GOOD = Result({"dense": Array.of(np.ones((1, 2), np.float32))})


class Panicked(BaseException):
    """As the bindings of native libraries raise it: no `Exception`."""


class Frail:
    """A runtime whose items fail by their names; `calls` has the names of every run."""

    name, version, traits = "frail", "1", Traits(accepts_ids=False, tasks=["encode"])

    def __init__(self):
        self.calls = []

    def load(self, spec):
        raise spec.options["raises"]

    def run(self, key, items, block_tokens=None):
        names = [item.item for item in items]
        self.calls.append(names)
        if "raises" in names:
            raise FloatingPointError("a kernel broke")
        if "large" in names:
            raise MemoryError("too much")
        if "panics" in names:
            raise Panicked("index out of bounds")
        return RanItems([self._one(name, alone=len(names) == 1) for name in names], len(names))

    def _one(self, name, *, alone):
        if name == "nan" or (name == "nan among others" and not alone):
            return RunFailed("not finite")
        return GOOD


def run(*names):
    runtime = Frail()
    items = [RunItem(name, "encode", [1]) for name in names]
    ran = Host(runtime).handle(Run(1, "m", items))
    return runtime, {d.item: d.failure.code if d.failure else "good" for d in ran.items}


def test_host_tries_an_item_that_was_not_finite_once_more_alone():
    """What comes right alone is served; what does not fails after exactly one second try."""
    runtime, done = run("a", "nan among others", "nan")
    assert done == {"a": "good", "nan among others": "good", "nan": "run_failed"}
    assert runtime.calls == [["a", "nan among others", "nan"], ["nan among others"], ["nan"]]


def test_host_splits_a_lost_batch_until_the_culprit_is_alone():
    """A batch that raises, or does not fit, costs only the item that makes it so."""
    for culprit, code in (
        ("raises", RunFailed.code),
        ("panics", RunFailed.code),
        ("large", OutOfMemory.code),
    ):
        runtime, done = run("a", "b", culprit, "c", "d")
        assert done == {"a": "good", "b": "good", culprit: code, "c": "good", "d": "good"}
        assert runtime.calls.count([culprit]) == 1


def null_run(*items):
    host = Host(registry.create("null", "cpu", 1))
    options = {"dim": 4, "nan": "bad"}
    host.handle(Load(1, ModelSpec("m", "", "", ["encode", "score"], options=options)))
    return host.handle(Run(2, "m", list(items))).items


def sent(name, *texts, task="encode", layout="single", partial=True):
    params = Params(partial=partial)
    return RunItem(name, task, [1] * len(texts), layout, texts=list(texts), params=params)


def test_host_lets_an_input_of_a_partial_item_fail_alone():
    """The others have the result that they have without it; an item that is not partial fails."""
    mixed, without, lost, whole = null_run(
        sent("mixed", "a", "bad", "b", "bad"),
        sent("without", "a", "b"),
        sent("lost", "bad", "bad"),
        sent("whole", "a", "bad", partial=False),
    )
    assert decode_result(mixed.result) == decode_result(without.result)
    assert {at: (f.code, f.input_index) for at, f in mixed.failures.items()} == {
        1: (RunFailed.code, 1),
        3: (RunFailed.code, 3),
    }
    assert (without.failures, whole.failures) == ({}, {})
    assert (bytes(lost.result), list(lost.failures), lost.failure) == (b"", [0, 1], None)
    assert (whole.failure.code, whole.failure.input_index) == (RunFailed.code, 1)


def test_host_fails_a_partial_item_whole_with_its_query():
    """A document fails alone; what is wrong with the query is wrong with every document."""
    documents, query = null_run(
        sent("documents", "q", "a", "bad", task="score", layout="shared"),
        sent("query", "bad", "a", "b", task="score", layout="shared"),
    )
    assert list(documents.failures) == [1]
    assert decode_result(documents.result).arrays["scores"].shape == [1]
    assert (query.failure.param, query.failures) == ("query", {})


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (MemoryError("no room"), "out_of_memory"),
        (OSError(errno.ENOMEM, "no room to map it"), "out_of_memory"),
        (FileNotFoundError(errno.ENOENT, "gone"), "weights_missing"),
        (ZeroDivisionError("a config of zeros"), "model_unavailable"),
        (ShoalError("its own word"), "internal_error"),
    ],
)
def test_host_load_fails_by_its_kind(raised, code):
    """Whatever a load raises comes back as the error that says whether a later try may succeed."""
    spec = ModelSpec("m", "", "", ["encode"], options={"raises": raised})
    answer = Host(Frail()).handle(Load(1, spec))
    assert isinstance(answer, Failed)
    assert answer.failure.code == code


def test_host_measures_each_model_and_says_what_was_kept():
    """What is measured is what was taken; it is forgotten with the model, kept or not."""
    host = Host(registry.create("null", "cpu", 1))
    spec = ModelSpec("m", "", "", ["encode"], options={"mib": 32})
    for keep, warm in ((True, False), (False, True), (False, False)):
        loaded = host.handle(Load(1, spec))
        assert 32 <= loaded.memory_bytes / 2**20 < 40
        assert host.ask(AskMemory(2)).models == {"m": loaded.memory_bytes}
        assert loaded.warm == warm
        assert host.handle(Unload(3, "m", keep=keep)).models == {}


class Parent(Frail):
    """A runtime whose engine is two processes beside it, which share the pages that it has."""

    held_bytes = 48 * 2**20

    def __init__(self):
        super().__init__()
        self.engine = None

    def load(self, spec):
        held = f"held = bytearray(b'x') * {self.held_bytes}"
        code = f"import os; {held}; os.fork(); os.write(1, b'.'); os.read(0, 1)"
        python = [sys.executable, "-I", "-S", "-c", code]
        self.engine = subprocess.Popen(python, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2):
            self.engine.stdout.read(1)
        return False

    def unload(self, key, *, keep=False):
        with self.engine:
            self.engine.stdin.close()

    def memory(self):
        return {}


def test_host_counts_what_an_engine_of_several_processes_holds():
    """In a model's size and in the process's, pages that they share once; gone when they are."""
    host = Host(Parent())
    before_bytes = host.ask(AskMemory(1)).process_bytes
    loaded = host.handle(Load(2, ModelSpec("m", "", "", ["encode"])))
    held = host.ask(AskMemory(3))
    after = host.handle(Unload(4, "m"))
    for grown_bytes in (loaded.memory_bytes, held.process_bytes - before_bytes):
        assert Parent.held_bytes <= grown_bytes < 1.5 * Parent.held_bytes
    assert after.process_bytes < before_bytes + 0.5 * Parent.held_bytes
