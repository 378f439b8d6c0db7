"""A text model of the demo catalog on a runtime that its entry does not name.

What is found here is the table of models and runtimes in the documentation.
"""

from __future__ import annotations

from functools import cache

import pytest
from msgspec.structs import replace

from shoal.catalog.load import load
from shoal.catalog.schema import Entry
from shoal.errors import ModelUnavailable
from shoal.wire.envelope import Inputs
from tests.contract.hosted import Hosted, answer, same
from tests.contract.subjects import TEXTS
from tests.support.prepared import Prepared

pytestmark = pytest.mark.slow

ENCODERS = ("onnx", "torch", "candle")
INPUTS = Inputs(texts=list(TEXTS[:2]))


def models() -> list[Entry]:
    """The first entry for each set of weights that a runtime of text encoders runs."""
    found: dict[tuple[str, str | None, str], Entry] = {}
    for entry in load(None).entries:
        if entry.runtime in ENCODERS[:2] and "text" in entry.inputs:
            found.setdefault((entry.source, entry.weights, entry.scorer), entry)
    return list(found.values())


@cache
def at_home(model: str, cache_dir) -> list:
    """The answer of a model on the runtime that its entry names."""
    prepared = Prepared(load(None).resolve(model), cache_dir)
    return answer(prepared.run(prepared.entry.tasks[0], INPUTS))


@pytest.mark.parametrize(
    ("hosted", "model"),
    [
        pytest.param(runtime, entry.id, id=f"{entry.id}-{runtime}")
        for runtime in ENCODERS
        for entry in models()
        if entry.runtime != runtime
    ],
    indirect=["hosted"],
    scope="session",
)
def test_contract_model_elsewhere(hosted: Hosted, model, record_property, tmp_path_factory):
    """It answers there as on its own runtime, or is refused at the load with the reason."""
    expected = at_home(model, tmp_path_factory.getbasetemp())
    entry = replace(load(None).resolve(model), id="elsewhere", runtime=hosted.subject.runtime)
    spec = hosted.spec(entry)
    record_property("model", model)
    try:
        hosted.wait(hosted.connection.load(spec))
    except ModelUnavailable as error:
        why = error.message.replace(spec.path, "its folder").removeprefix(f"{spec.key}: ")
        record_property("refused", why)
    else:
        (found,) = hosted.answers(INPUTS, entry=entry)
        assert same(found, expected)
    finally:
        hosted.unload(entry)
    left = hosted.wait(hosted.connection.memory()).models
    assert set(left) == {hosted.subject.entry.key}
