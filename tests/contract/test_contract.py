"""What every runtime keeps to, whatever engine is in it.

The name of a test is the name of the claim that a runtime may declare unsupported (`declared`),
and its docstring is the claim in the documentation.
"""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from shoal.errors import (
    InvalidRequest,
    ModelUnavailable,
    OutOfMemory,
    RunFailed,
    ShoalError,
)
from shoal.wire.envelope import Inputs
from tests.contract.declared import ADAPTERS, BATCHES, GENERATION, GROUPS, UNSUPPORTED
from tests.contract.hosted import Hosted, answer, same
from tests.contract.tainted import damaged

pytestmark = pytest.mark.slow

MIB = 2**20
CYCLES = 10
# Allocators keep some of what they got; a leak of a model's weights is far more.
SLACK_BYTES = 8 * MIB
# A thread with less of the work than this only hands it over.
BUSY_SHARE = 0.2
LEAST_CPU_S = 0.4


def test_contract_traits(hosted: Hosted):
    """What it says of itself is what is declared of it here: tasks, adapters, streams, a tier."""
    hello, name = hosted.hello, hosted.subject.runtime
    assert (hello.runtime, bool(hello.version)) == (name, True)
    assert set(hosted.subject.entry.tasks) <= set(hello.traits.tasks)
    assert (
        hello.traits.streams == ("generate" in hello.traits.tasks) == (name in GROUPS[GENERATION])
    )
    assert hello.traits.lora == (name in GROUPS[ADAPTERS])
    assert hello.traits.host_tier == ("warm_reload" not in UNSUPPORTED[BATCHES][name])


def test_contract_parity(hosted: Hosted):
    """Its answers are those of the makers' own code on the same weights, or what was said."""
    expected = hosted.subject.reference()
    fits = hosted.subject.fits or same
    assert len(hosted.alone) == len(expected)
    for ours, theirs in zip(hosted.alone, expected, strict=True):
        assert fits(ours, theirs), (ours, theirs)


def test_contract_batch_mates(hosted: Hosted):
    """An input's answer does not depend on what else is in the batch or in the item."""
    inputs = hosted.subject.inputs
    *each, together = hosted.answers(*inputs, _joined(inputs))
    assert all(map(same, each, hosted.alone))
    assert same(together, [one for alone in hosted.alone for one in alone])


def test_contract_repeated_inputs(hosted: Hosted):
    """Equal inputs get equal answers, each in its place."""
    first, second = hosted.subject.inputs[:2]
    (found,) = hosted.answers(_joined([first, second, first]))
    alone = [*hosted.alone[0], *hosted.alone[1], *hosted.alone[0]]
    assert same(found, alone)
    assert np.array_equal(found[0], found[2]) if isinstance(found[0], np.ndarray) else True


def test_contract_poison(hosted: Hosted):
    """An item that cannot be run fails alone; those beside it are answered as ever."""
    first, last = (hosted.item(inputs) for inputs in hosted.subject.inputs[:2])
    one, failed, other = hosted.run([first, hosted.subject.poison, last])
    assert isinstance(failed, ShoalError)
    assert same(answer(one), hosted.alone[0])
    assert same(answer(other), hosted.alone[1])


def test_contract_non_finite(hosted: Hosted, tmp_path):
    """Numbers that are not finite are the failure of that item, never an answer."""
    tainted = hosted.subject.tainted(tmp_path / "tainted")
    hosted.load(tainted.entry)
    try:
        items = [hosted.item(each, tainted.entry) for each in (tainted.good, tainted.bad)]
        first, failed, last = hosted.run([*items, items[0]], tainted.entry)
    finally:
        hosted.unload(tainted.entry)
    assert isinstance(failed, RunFailed)
    assert same(answer(first), answer(last))
    assert all(np.isfinite(row).all() for row in answer(first))


def test_contract_over_long(hosted: Hosted):
    """An input over the limit is refused, and named by its place."""
    inputs = _joined([hosted.subject.inputs[0], hosted.subject.too_long()])
    refused = hosted.outcome(inputs)
    assert isinstance(refused, InvalidRequest)
    assert refused.input_index == 1


def test_contract_truncate(hosted: Hosted):
    """An input over the limit is cut where the request says so: what is behind does not count."""
    (long,) = hosted.subject.too_long().texts
    assert same(
        answer(hosted.outcome(Inputs(texts=[long]), truncate=True)),
        answer(hosted.outcome(Inputs(texts=[f"{long} and more"]), truncate=True)),
    )


def test_contract_unknown_names(hosted: Hosted):
    """An output, a label or a language that the model lacks is refused by its name."""
    ((param, value),) = hosted.subject.unknown.items()
    refused = hosted.outcome(hosted.subject.inputs[0], **{param: value})
    assert isinstance(refused, InvalidRequest)
    assert refused.param == param
    assert (value if isinstance(value, str) else value[0]) in refused.message


def test_contract_memory(hosted: Hosted):
    """It says what each model takes and what the process holds, and forgets what was unloaded."""
    key, other = hosted.subject.entry.key, hosted.subject.other
    loaded = hosted.load(other)
    both = hosted.wait(hosted.connection.memory())
    assert loaded.memory_bytes == both.models[other.key]
    assert set(both.models) == {key, other.key}
    assert min(both.models.values()) > 0
    assert max(both.models.values()) < both.process_bytes
    hosted.unload(other)
    assert set(hosted.wait(hosted.connection.memory()).models) == {key}


def test_contract_cycles(hosted: Hosted):
    """Loaded and unloaded ten times, the process holds no more than after the first few."""
    other = hosted.subject.other
    held = []
    for _ in range(CYCLES):
        hosted.load(other)
        hosted.unload(other)
        held.append(hosted.held_bytes())
    assert max(held[-3:]) <= max(held[1:4]) + SLACK_BYTES, [each // MIB for each in held]
    assert same(hosted.answers(hosted.subject.inputs[0])[0], hosted.alone[0])


def test_contract_broken_load(hosted: Hosted, tmp_path):
    """A missing or damaged file fails the load by a typed error and leaves nothing behind."""
    spec = replace(hosted.spec(hosted.subject.entry), key="broken@1")
    if hosted.subject.broken:
        broken = [replace(spec, options=options) for options in hosted.subject.broken.values()]
    else:
        half = damaged(spec.path, tmp_path / "damaged", hosted.subject.weights)
        broken = [replace(spec, path=str(path)) for path in (tmp_path / "nowhere", half)]
    held = []
    for _ in range(3):
        for each in broken:
            with pytest.raises((ModelUnavailable, OutOfMemory)):
                hosted.wait(hosted.connection.load(each))
        held.append(hosted.held_bytes())
    assert held[-1] <= held[0] + SLACK_BYTES
    memory = hosted.wait(hosted.connection.memory())
    assert set(memory.models) == {hosted.subject.entry.key}
    assert same(hosted.answers(hosted.subject.inputs[0])[0], hosted.alone[0])


def test_contract_warm_reload(hosted: Hosted):
    """What an unload kept makes the next load a warm one, and the answers are the same."""
    entry = hosted.subject.entry
    hosted.unload(entry, keep=True)
    assert hosted.wait(hosted.connection.memory()).models == {}
    assert hosted.load(entry).warm
    assert same(hosted.answers(hosted.subject.inputs[1])[0], hosted.alone[1])
    hosted.unload(entry)
    assert not hosted.load(entry).warm


def test_contract_not_loaded(hosted: Hosted):
    """A model that is not loaded can be unloaded, which does nothing, and cannot be run."""
    nobody = replace(hosted.subject.entry, id="nobody")
    hosted.unload(nobody)
    (failed,) = hosted.run([hosted.item(hosted.subject.inputs[0])], nobody)
    assert isinstance(failed, ModelUnavailable)
    assert same(hosted.answers(hosted.subject.inputs[0])[0], hosted.alone[0])


def test_contract_two_models(hosted: Hosted):
    """Two models in one process answer as each does alone; unloading one leaves the other."""
    subject, inputs = hosted.subject, hosted.subject.inputs[0]
    hosted.unload(subject.entry)
    hosted.load(subject.other)
    (alone,) = hosted.answers(inputs, entry=subject.other)
    hosted.load(subject.entry)
    (other,) = hosted.answers(inputs, entry=subject.other)
    (ours,) = hosted.answers(inputs)
    assert same(other, alone)
    assert same(ours, hosted.alone[0])
    assert same(ours, other) == (subject.entry.source == subject.other.source != "file:///")
    hosted.unload(subject.other)
    assert same(hosted.answers(inputs)[0], hosted.alone[0])


def test_contract_threads(hosted: Hosted):
    """Given one thread, one thread does the work."""
    items = [hosted.item(inputs) for inputs in hosted.subject.inputs]
    before_s = hosted.thread_cpu_s()
    used_s: dict[int, float] = {}
    while sum(used_s.values()) < LEAST_CPU_S:
        hosted.run(items)
        used_s = {id_: s - before_s.get(id_, 0.0) for id_, s in hosted.thread_cpu_s().items()}
    busy = [s for s in used_s.values() if s > BUSY_SHARE * sum(used_s.values())]
    assert len(busy) == 1, used_s


def _joined(inputs) -> Inputs:
    """One item's inputs of several's."""
    return Inputs(
        texts=[text for each in inputs for text in each.texts],
        blobs=[blob for each in inputs for blob in each.blobs],
    )
