"""Admission refuses what cannot be in time, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.admission import FleetLoad, refuse, wait_s

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
    needed_s = wait_s(load) + cost_s / load.devices
    if after_s is None:
        assert needed_s <= time_s or load.backlog_s == 0.0
    else:
        assert needed_s > time_s
        assert after_s >= needed_s - time_s
        # By then that much backlog is worked off.
        left = max(0.0, load.backlog_s - after_s * load.devices)
        later = FleetLoad(left, load.devices, load.active_models, load.quantum_s)
        assert left == 0.0 or refuse(later, cost_s, time_s + 1e-6) is None


@given(LOADS, st.floats(0, 10), st.floats(0.1, 60))
def test_admission_counts_cost_not_requests(load, cost_s, time_s):
    """What is refused at a cost is refused at any larger cost."""
    if refuse(load, cost_s, time_s) is not None:
        assert refuse(load, cost_s * 2 + 0.1, time_s) is not None
