"""Admission refuses what cannot be in time, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.admission import FleetLoad, ahead_s, needed_s, refuse, wait_s

LOADS = st.builds(
    FleetLoad,
    backlog_s=st.floats(0, 1000),
    devices=st.integers(1, 16),
    active_models=st.integers(0, 100),
    quantum_s=st.floats(0.01, 1),
)


def test_admission_wait_is_the_bound_of_the_module():
    """Ten seconds of backlog on two devices, four active models, quanta of 0.1 s."""
    assert wait_s(FleetLoad(10.0, 2, 4, 0.1)) == pytest.approx(5.0 + (2 + 2) * 0.1)


def test_admission_takes_anything_when_the_fleet_is_idle():
    """A large request with a short deadline may try its luck on idle devices."""
    assert refuse(FleetLoad(0.0, 1, 0, 0.1), cost_s=100.0, time_s=0.01) is None


@given(LOADS, st.floats(0, 100), st.floats(0.001, 600))
def test_admission_refuses_exactly_what_would_be_late(load, cost_s, time_s):
    """A refusal means that the bound is past the deadline, and names a time that mends it."""
    after_s = refuse(load, cost_s, time_s)
    late_s = needed_s(load, cost_s) - time_s
    if after_s is None:
        assert late_s <= 0 or load.backlog_s == 0.0
    else:
        assert after_s >= late_s > 0
        # By then that much backlog is worked off.
        left = max(0.0, load.backlog_s - after_s * load.devices)
        later = FleetLoad(left, load.devices, load.active_models, load.quantum_s)
        assert left == 0.0 or refuse(later, cost_s, time_s + 1e-6) is None


@given(LOADS, st.floats(0, 10), st.floats(0.1, 60))
def test_admission_counts_cost_not_requests(load, cost_s, time_s):
    """What is refused at a cost is refused at any larger cost."""
    if refuse(load, cost_s, time_s) is not None:
        assert refuse(load, cost_s * 2 + 0.1, time_s) is not None


def test_admission_does_not_wait_for_turns_that_cannot_happen():
    """A hundredth of a second of work before it is no reason to refuse a tight deadline."""
    load = FleetLoad(0.01, 1, 2, 0.4)
    assert wait_s(load) > 1.2
    assert refuse(load, cost_s=0.01, time_s=0.1) is None
    assert refuse(load, cost_s=0.1, time_s=0.1) is not None


def test_admission_lane_and_model_wait_only_for_their_share():
    """100 s of a bulk model let an interactive one wait for a fraction of its own work."""
    shares = {"lane_share": 0.8, "line_share": 1.0}
    assert ahead_s(100.0, 0.0, 0.0, 1.0, **shares) == pytest.approx(0.25)
    assert ahead_s(102.0, 2.0, 2.0, 1.0, **shares) == pytest.approx(2.75)
    shares = {"lane_share": 1.0, "line_share": 0.25}
    assert ahead_s(40.0, 40.0, 1.0, 1.0, **shares) == pytest.approx(7.0)


SECONDS = st.floats(0, 1000)
SHARE = st.floats(0.05, 1)


@given(st.tuples(SECONDS, SECONDS, SECONDS), SECONDS, SHARE, SHARE)
def test_admission_work_ahead_is_bounded_by_what_there_is(waiting, cost_s, lane, line):
    """What is ahead is between the line's own and all that waits, and grows with each."""
    line_s, lane_s, total_s = sorted(waiting)
    shares = {"lane_share": lane, "line_share": line}
    ahead = ahead_s(total_s, lane_s, line_s, cost_s, **shares)
    assert line_s - 1e-6 <= ahead <= total_s
    assert ahead <= ahead_s(total_s + 1, lane_s + 1, line_s + 1, cost_s, **shares)
    assert ahead <= ahead_s(total_s, lane_s, line_s, cost_s + 1, **shares) + 1e-6
