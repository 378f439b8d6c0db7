"""Splitting, gathering, and the verdict on an attempt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal.core.delivery import FIRST_DELAY_S, MOST_DELAY_S, judge
from shoal.core.gather import Gather
from shoal.core.split import spans


@given(
    st.lists(st.integers(1, 500), max_size=60),
    st.integers(0, 100),
    st.integers(1, 1000),
    st.integers(1, 20),
)
def test_spans_cover_the_inputs_in_order_within_both_bounds(costs, shared, most, count):
    """Every input is in exactly one span; only a single input may be over the bound."""
    cuts = spans(costs, shared_tokens=shared, max_tokens=most, max_inputs=count)
    assert [i for start, end in cuts for i in range(start, end)] == list(range(len(costs)))
    for start, end in cuts:
        assert end - start <= count
        if end - start > 1:
            assert sum(costs[start:end]) + shared * (end - start) <= most


def test_gather_keeps_the_first_of_each_part():
    """A second outcome of an item, or one of no item, changes nothing."""
    gather = Gather(2)
    assert gather.add(1, "b")
    assert not gather.add(1, "B")
    assert not gather.add(2, "c")
    assert not gather.complete
    with pytest.raises(ValueError, match="1 parts"):
        gather.parts()
    assert gather.add(0, "a")
    assert gather.complete
    assert gather.parts() == ["a", "b"]


@pytest.mark.parametrize(
    "error",
    [
        None,
        errors.InvalidRequest("x"),
        errors.DeadlineExceeded("x"),
        errors.RunFailed("x"),
        errors.ModelUnavailable("x"),
        errors.Bug("x"),
    ],
)
def test_judge_answers_at_once_what_no_other_attempt_can_mend(error):
    """Results, callers' faults and lasting faults are replied and acked at the first attempt."""
    assert judge(error, attempt=1, max_attempts=4).reply


@pytest.mark.parametrize(
    ("error", "buried"),
    [
        (None, False),
        (errors.InvalidRequest("x"), False),
        (errors.DeadlineExceeded("x"), False),
        (errors.ModelUnavailable("x"), False),
        (errors.RunFailed("x"), True),
        (errors.Bug("x"), True),
        (errors.RuntimeCrashed("x"), True),
        (errors.OutOfMemory("x"), True),
    ],
)
def test_judge_buries_the_items_that_may_be_culprits(error, buried):
    """At its last attempt an item is kept if it may be the cause, never for its model's fault."""
    assert judge(error, attempt=4, max_attempts=4).bury is buried
    if isinstance(error, (errors.RuntimeCrashed, errors.OutOfMemory)):
        assert not judge(error, attempt=1, max_attempts=4).bury


@pytest.mark.parametrize("error", [errors.RuntimeCrashed("x"), errors.OutOfMemory("x")])
def test_judge_gives_back_what_another_attempt_may_mend(error):
    """Crashes go back with growing, bounded delays, and are answered at the last attempt."""
    delays = [judge(error, attempt=n, max_attempts=9).again_in_s for n in range(1, 9)]
    assert delays[0] == FIRST_DELAY_S
    assert delays == sorted(delays)
    assert delays[-1] == MOST_DELAY_S
    assert judge(error, attempt=9, max_attempts=9).reply


def test_errors_travel_by_code():
    """A code becomes the class again; a code of a newer peer becomes a bug, not a crash."""
    error = errors.from_code("input_too_long", "m", param="inputs[2]", input_index=2)
    assert isinstance(error, errors.InputTooLong)
    assert (error.param, error.input_index) == ("inputs[2]", 2)
    assert isinstance(errors.from_code("from_the_future", "m"), errors.Bug)
