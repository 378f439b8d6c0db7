"""The host of a runtime: second tries, and a culprit alone."""

from __future__ import annotations

import numpy as np

from shoal.errors import OutOfMemory, RunFailed
from shoal.ipc.messages import Run, RunItem, Traits
from shoal.runtimes.host import Host
from shoal.runtimes.interface import RanItems
from shoal.wire.arrays import Array
from shoal.wire.envelope import Result

GOOD = Result({"dense": Array.of(np.ones((1, 2), np.float32))})


class Frail:
    """A runtime whose items fail by their names; `calls` has the names of every run."""

    name, version, traits = "frail", "1", Traits(accepts_ids=False, tasks=["encode"])

    def __init__(self):
        self.calls = []

    def run(self, key, items, block_tokens=None):
        names = [item.item for item in items]
        self.calls.append(names)
        if "raises" in names:
            raise FloatingPointError("a kernel broke")
        if "large" in names:
            raise MemoryError("too much")
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
    for culprit, code in (("raises", RunFailed.code), ("large", OutOfMemory.code)):
        runtime, done = run("a", "b", culprit, "c", "d")
        assert done == {"a": "good", "b": "good", culprit: code, "c": "good", "d": "good"}
        assert runtime.calls.count([culprit]) == 1
