"""The batch former: the partition is optimal, the head is always in, nothing is lost."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.batching import LAUNCH_TOKENS, Window, oldest_head, partition
from shoal.core.types import Item

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=8)
ITEM_LENGTHS = st.lists(
    st.lists(st.integers(1, 400), min_size=1, max_size=4), min_size=1, max_size=30
)


def item(name, *lengths, arrived_s=0.0, deadline_s=1e9, lane="interactive"):
    return Item(str(name), "m", lane, tuple(lengths), deadline_s, arrived_s)


def window(budget_tokens=1024, **more):
    return Window(
        "m", more.pop("lane", "interactive"), budget_tokens=budget_tokens, max_items=100, **more
    )


def cost(lengths, groups):
    return sum(LAUNCH_TOKENS + max(lengths[i] for i in g) * len(g) for g in groups)


def best_cost(lengths, budget):
    """By trying every way to cut the sorted lengths."""
    ordered = sorted(lengths)
    n, best = len(ordered), float("inf")
    for cuts in itertools.product([0, 1], repeat=n - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), n]
        blocks = [ordered[a:b] for a, b in itertools.pairwise(edges)]
        if all(len(b) == 1 or max(b) * len(b) <= budget for b in blocks):
            best = min(best, sum(LAUNCH_TOKENS + max(b) * len(b) for b in blocks))
    return best


@given(LENGTHS, st.integers(50, 1000))
def test_partition_is_the_cheapest_within_the_budget(lengths, budget):
    """No other contiguous cut of the sorted lengths costs less; every index is in it once."""
    groups = partition(lengths, budget)
    assert sorted(i for g in groups for i in g) == list(range(len(lengths)))
    assert all(len(g) == 1 or max(lengths[i] for i in g) * len(g) <= budget for g in groups)
    assert cost(lengths, groups) == best_cost(lengths, budget)


def test_partition_of_nothing_is_nothing():
    """No sequences, no passes."""
    assert partition([], 1024) == []


def test_partition_runs_an_over_long_sequence_alone():
    """A sequence over the budget shares its pass with nobody."""
    assert [2] in partition([10, 12, 5000, 11], 1024)


@settings(max_examples=60)
@given(ITEM_LENGTHS, st.integers(64, 2048), st.booleans())
def test_window_serves_everything_once_and_the_head_first(all_lengths, budget, packing):
    """Every batch holds the oldest item, keeps the budget, and all items come out once."""
    w = window(budget, packing=packing)
    items = [item(n, *lengths) for n, lengths in enumerate(all_lengths)]
    assert all(w.add(i) for i in items)
    served = []
    while (head := w.head) is not None:
        batch = w.next_batch()
        assert batch is not None
        assert head in batch.items
        if len(batch.items) > 1:
            assert batch.padded_tokens <= budget
        served += batch.items
    assert sorted(served, key=lambda i: int(i.id)) == items
    assert (len(w), w.tokens, w.next_batch()) == (0, 0, None)


def test_window_puts_similar_lengths_together():
    """Short items do not share a padded pass with a long head."""
    w = window(1024)
    for n, length in enumerate([200, 10, 210, 11, 190, 12]):
        w.add(item(n, length))
    batch = w.next_batch()
    assert batch is not None
    assert [i.id for i in batch.items] == ["0", "2", "4"]


def test_window_with_packing_takes_the_oldest_first():
    """Where nothing is padded, arrival order decides, up to the budget."""
    w = window(420, packing=True)
    for n, length in enumerate([200, 10, 210, 11]):
        w.add(item(n, length))
    batch = w.next_batch()
    assert batch is not None
    assert [i.id for i in batch.items] == ["0", "1", "2"]


def test_window_is_bounded_and_refuses_doubles():
    """A full window, and an item that is here already, are refused."""
    w = Window("m", "bulk", budget_tokens=10, max_items=2)
    assert [w.add(item("a", 1)), w.add(item("a", 1)), w.add(item("b", 1)), w.add(item("c", 1))] == [
        True,
        False,
        True,
        False,
    ]


def test_window_expire_and_remove_take_items_out():
    """Expired and cancelled items never reach a batch."""
    w = window()
    for n in range(4):
        w.add(item(n, 5, deadline_s=float(n)))
    assert [i.id for i in w.expire(1.0)] == ["0", "1"]
    assert [i.id for i in w.remove(["3", "unknown"])] == ["3"]
    assert (w.ids(), w.tokens) == (["2"], 5)


def test_oldest_head_lets_bulk_yield_but_not_for_ever():
    """Interactive work overtakes bulk work that came up to a second before it, and no more."""
    bulk, interactive = window(lane="bulk"), window()
    bulk.add(item("old", 1, arrived_s=0.0, lane="bulk"))
    interactive.add(item("new", 1, arrived_s=0.9))
    assert oldest_head([bulk, interactive]) is interactive
    interactive.next_batch()
    interactive.add(item("newer", 1, arrived_s=1.1))
    assert oldest_head([bulk, interactive]) is bulk
    assert oldest_head([window()]) is None
