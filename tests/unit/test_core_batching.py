"""The batch former: the partition is optimal, the head is always in, nothing is lost."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.batching import LAUNCH_TOKENS, MAX_BATCH_BYTES, Window, partition
from shoal.core.types import Item

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=8)
ITEM_LENGTHS = st.lists(
    st.lists(st.integers(1, 400), min_size=1, max_size=4), min_size=1, max_size=30
)


def item(name, *lengths, tenant=""):
    return Item(str(name), "m", "interactive", tuple(lengths), 1e9, 0.0, tenant)


def window():
    return Window("m", "interactive", max_items=100)


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
def test_window_serves_everything_once_and_the_first_always(all_lengths, budget, packing):
    """Every batch holds the item it was formed around, keeps the budget, and none comes twice."""
    w = window()
    items = [item(n, *lengths) for n, lengths in enumerate(all_lengths)]
    assert all(w.add(i, 1e9) for i in items)
    served = []
    while (head := w.head) is not None:
        taken = w.take(head, budget_tokens=budget, launch_tokens=32, packing=packing)
        assert taken[0] is head
        sequences = [n for i in taken for n in i.lengths_tokens]
        padded = sum(sequences) if packing else max(sequences) * len(sequences)
        assert len(taken) == 1 or padded <= budget
        served += taken
    assert sorted(served, key=lambda i: int(i.id)) == items
    assert (len(w), w.tokens, w.head, w.most_urgent()) == (0, 0, None, None)


def take(w, budget=1024, *, packing=False):
    return [i.id for i in w.take(w.head, budget_tokens=budget, launch_tokens=32, packing=packing)]


def test_window_puts_similar_lengths_together():
    """Short items do not share a padded pass with a long head."""
    w = window()
    for n, length in enumerate([200, 10, 210, 11, 190, 12]):
        w.add(item(n, length), 1e9)
    assert sorted(take(w)) == ["0", "2", "4"]


def test_window_fills_a_batch_of_one_length_without_padding():
    """Where one length fills the budget, nothing else joins; the oldest of it go first."""
    w = window()
    for n in range(30):
        w.add(item(n, 100 if n % 2 else 90), 1e9)
    assert take(w, 900) == [str(n) for n in range(0, 20, 2)]


def test_window_with_packing_takes_the_oldest_first():
    """Where nothing is padded, arrival order decides, up to the budget."""
    w = window()
    for n, length in enumerate([200, 10, 210, 11]):
        w.add(item(n, length), 1e9)
    assert take(w, 420, packing=True) == ["0", "1", "2"]


def test_window_is_bounded_and_refuses_doubles():
    """A full window, and an item that is here already, are refused."""
    w = Window("m", "bulk", max_items=2)
    added = [w.add(item(name, 1), 1e9) for name in ("a", "a", "b", "c")]
    assert added == [True, False, True, False]


def test_window_expire_and_remove_take_items_out():
    """Hopeless and cancelled items never reach a batch."""
    w = window()
    for n in range(4):
        w.add(item(n, 5), float(n))
    assert [i.id for i in w.expire(1.0)] == ["0", "1"]
    assert [i.id for i in w.remove(["3", "unknown"])] == ["3"]
    assert (w.ids(), w.tokens) == (["2"], 5)
    assert w.most_urgent() == (2.0, item(2, 5))


def test_window_bookkeeping_does_not_grow_with_what_has_left():
    """Thousands of items through a small window leave nothing behind."""
    w = Window("m", "bulk", max_items=8)
    for n in range(5000):
        w.add(replace(item(n, 5), tenant=f"t{n}", request=f"r{n}"), 1e9 - n)
        w.remove([str(n)])
    assert len(w._starts) <= 17
    assert (len(w), len(w._by_length)) == (0, 0)
    assert max(len(w._tenants), len(w._shares._used)) < 200


def test_bounds_bytes_of_a_batch():
    """Files that cost few tokens fill a batch by their bytes; one over the bound goes alone."""
    w = window()
    half = MAX_BATCH_BYTES // 2
    for name, size_bytes in (("a", half), ("b", half), ("c", 1), ("d", 2 * MAX_BATCH_BYTES)):
        w.add(Item(name, "m", "interactive", (1,), 1e9, 0.0, size_bytes=size_bytes), 1e9)
    assert [take(w), take(w), take(w)] == [["a", "b"], ["c"], ["d"]]


def test_window_head_is_of_the_tenant_served_least():
    """Tenants take turns; within one, the oldest is next."""
    w = window()
    for n in range(6):
        w.add(item(n, 100, tenant="big"), 1e9)
    w.add(item("s", 100, tenant="small"), 1e9)
    first = take(w, 100)
    second = take(w, 100)
    assert sorted(first + second) == ["0", "s"]
