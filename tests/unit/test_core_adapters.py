"""Which adapters stay beside a copy of a model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.adapters import MAX_RESIDENT_ADAPTERS, Moves, ResidentAdapters, parted

KEYS = st.sampled_from([f"b@a{n}@1" for n in range(9)])


def _with(*keys):
    adapters = ResidentAdapters()
    for at, key in enumerate(keys):
        adapters.add(key, 10 + at, float(at))
    return adapters


def test_adapters_plan_evicts_the_longest_idle_ones():
    """As many go as must, those that were used last stay, and what is wanted is not among them."""
    adapters = _with("a", "b", "c")
    assert adapters.plan(["a", "b"], 3) == Moves()
    assert adapters.plan(["d"], 4) == Moves(load=("d",))
    assert adapters.plan(["d", "a"], 3) == Moves(("b",), ("d",))
    adapters.pin(["b"])
    adapters.unpin(["b"], 9.0)
    assert adapters.plan(["d", "e"], 3) == Moves(("a", "c"), ("d", "e"))


def test_adapters_in_use_never_go():
    """A plan waits while too many are in use; one that could never be is a fault of the asker."""
    adapters = _with("a", "b")
    adapters.pin(["a", "b"])
    adapters.pin(["b"])
    assert adapters.plan(["c"], 2) is None
    adapters.unpin(["b"], 5.0)
    assert adapters.plan(["c"], 2) is None
    adapters.unpin(["b"], 6.0)
    assert adapters.plan(["c"], 2) == Moves(("b",), ("c",))
    with pytest.raises(ValueError, match="3 adapters at once, of 2"):
        adapters.plan(["c", "d", "e"], 2)


def test_adapters_bytes_are_counted_and_unwanted_ones_named():
    """What is dropped gives its bytes back; what nobody can ask for is named unless in use."""
    adapters = _with("a", "b", "c")
    assert adapters.size_bytes == 33
    adapters.pin(["a"])
    assert adapters.unwanted(lambda key: key == "b") == ["c"]
    assert adapters.drop("c") == 12
    assert adapters.size_bytes == 21


@given(st.lists(st.tuples(st.sets(KEYS, max_size=4), st.booleans())), st.integers(4, 6))
def test_adapters_are_never_more_than_their_bound(uses, most):
    """Whatever is used in whatever order: the bound holds and what is in use is there."""
    adapters = ResidentAdapters()
    in_use = []
    for now_s, (wanted, ends) in enumerate(uses):
        moves = adapters.plan(wanted, most)
        if moves is not None:
            for key in moves.unload:
                adapters.drop(key)
            for key in moves.load:
                adapters.add(key, 1, now_s)
            adapters.pin(wanted)
            in_use.append(wanted)
        assert len(adapters.here) <= most <= MAX_RESIDENT_ADAPTERS
        assert set().union(*in_use) <= adapters.here.keys()
        if in_use and (ends or moves is None):
            adapters.unpin(in_use.pop(0), now_s)


@given(st.lists(st.one_of(st.just(""), KEYS)), st.integers(1, 4))
def test_adapters_of_a_batch_are_cut_into_parts_that_fit(keys, most):
    """Every item is in one part, no part needs more than the bound, and items keep their order."""
    parts = parted(keys, most)
    assert sorted(at for part in parts for at in part) == list(range(len(keys)))
    for part in parts:
        assert part == sorted(part)
        assert len({keys[at] for at in part} - {""}) <= most
    distinct = len(set(keys) - {""})
    assert len(parts) == max(-(-distinct // most), bool(keys))
