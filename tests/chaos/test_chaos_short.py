"""The chaos run in its shortest form, and what its seed decides."""

from __future__ import annotations

import pytest

from tests.chaos.plan import draw, schedule
from tests.chaos.run import run


def test_chaos_seed_decides_faults_and_requests():
    """The same seed gives the same run, another one another."""
    assert schedule("a", 60) == schedule("a", 60)
    assert schedule("a", 60) != schedule("b", 60)
    assert [draw("a", n) for n in range(200)] == [draw("a", n) for n in range(200)]
    assert draw("a", 1) != draw("a", 2)


def test_chaos_long_run_strikes_every_part_in_every_way():
    """No fault is left out by chance in a run of a few minutes."""
    kinds = {(f.part, f.blow) for f in schedule("a", 240)}
    assert len(kinds) == 11


@pytest.mark.slow
def test_chaos_short_run_is_clean(tmp_path):
    """Under load a runtime, the broker and a gateway are struck: nothing is lost, crossed or twice.

    Longer runs are those of `make chaos`.
    """
    story = run(tmp_path, seed="breeze", length_s=11.0, storage="file")
    assert {fault.part for fault in story.faults} == {"runtime", "broker", "gateway"}
    plan = "\n".join(map(str, story.faults))
    assert story.clean, f"{plan}\n{story.ledger}\n{story.complaints}\n{story.output}"
    assert story.ledger.counts()["answered"] > 30
