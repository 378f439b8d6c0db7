"""What `make contract` writes of claims that it could not, or was not asked to, check."""

from __future__ import annotations

import pytest

from tests.contract.__main__ import HELD, Recorder
from tests.contract.declared import GENERATION, GROUPS

CLAIM = "streaming"
WHY = "not run here: the bundle of sglang is not built here"


@pytest.fixture
def recorder():
    """A run of one claim that left sglang out."""
    made = Recorder()
    made.claims[GENERATION] = {CLAIM: "Pieces make the whole."}
    made.lines = {CLAIM: 1}
    made.found = {(GENERATION, name, CLAIM): HELD for name in GROUPS[GENERATION]}
    del made.found[GENERATION, "sglang", CLAIM]
    made.left_out = {(GENERATION, "sglang", CLAIM): WHY}
    return made


def test_contract_results_keep_what_was_found_before(recorder):
    """A runtime that is not here keeps its column, its version and its models; without, it says."""
    first = recorder.results({})
    assert first["groups"][GENERATION]["found"]["sglang"] == {CLAIM: WHY}
    first["groups"][GENERATION]["found"]["sglang"] = {CLAIM: HELD}
    first["runtimes"]["sglang"] = {"version": "1"}
    first["models"] = {"a-model": {"torch": HELD}}
    recorder.elsewhere = {("a-model", "torch")}
    assert recorder.results(first) == first


def test_contract_results_lack_nothing_that_can_run(recorder):
    """A claim that was never checked, of a runtime that is here, is an error and not a gap."""
    del recorder.found[GENERATION, "null", CLAIM]
    with pytest.raises(KeyError):
        recorder.results({})
