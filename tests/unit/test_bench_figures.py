import importlib.util
import math
import random
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "bench" / "measure" / "figures.py"


@pytest.fixture(scope="module")
def figures():
    spec = importlib.util.spec_from_file_location("bench_figures", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bursts(count, size, every_s):
    """Results of batches that take `every_s` each and all come at its end."""
    return [(n * every_s, 1.0) for n in range(1, count + 1) for _ in range(size)]


@pytest.mark.parametrize(("first", "last"), [(0, 59), (5, 47), (9, 50)])
def test_rate_of_bursts_is_exact_wherever_it_is_cut(figures, first, last):
    """Batches of ten that take two seconds each are five results a second, from any start on."""
    assert figures.steady_rate(bursts(6, 10, 2.0), first, last) == pytest.approx(5.0)


def test_rate_of_unequal_bursts_is_exact(figures):
    """Batches whose time goes with their size have one rate, small first ones or not."""
    points, now_s = [], 0.0
    for size in (8, 16, 64, 40):
        now_s += size / 4.0
        points += [(now_s + n * 1e-4, 1.0) for n in range(size)]
    assert figures.steady_rate(points, 2, len(points)) == pytest.approx(4.0, rel=1e-3)


def test_rate_within_one_burst_is_unknown(figures):
    """What came in one burst says nothing about time."""
    assert math.isnan(figures.steady_rate(bursts(1, 10, 2.0), 0, 9))


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        ([4.0, 1.0, 3.0, 2.0], 0.5, 2.0),
        ([4.0, 1.0, 3.0, 2.0], 0.51, 3.0),
        ([float(n) for n in range(1, 101)], 0.95, 95.0),
        ([1.0, math.inf], 0.99, math.inf),
        ([7.0], 0.0, 7.0),
    ],
)
def test_quantile_is_the_smallest_value_that_enough_keep_within(figures, values, q, expected):
    """An infinite value, a call without an answer, counts as one."""
    assert figures.quantile(values, q) == expected


def test_quantile_of_nothing_is_unknown(figures):
    """No calls have no median."""
    assert math.isnan(figures.quantile([], 0.5))


def test_ratio_interval_sees_through_a_drifting_machine(figures):
    """Rounds may differ tenfold: the interval is that of the ratio within each round."""
    pairs = [(3.0 * speed, speed) for speed in (1.0, 10.0, 2.0, 5.0)]
    assert figures.ratio_interval(pairs) == pytest.approx((3.0, 3.0, 3.0))


def test_ratio_interval_covers_the_truth_as_often_as_it_says(figures):
    """95 % intervals of 12 noisy pairs hold the true ratio in about 95 % of trials."""
    rng = random.Random(5)
    held = 0
    figures.RESAMPLES = 200
    for _ in range(100):
        pairs = [(2.0 * math.exp(rng.gauss(0, 0.3)), 1.0) for _ in range(12)]
        _, low, high = figures.ratio_interval(pairs)
        held += low <= 2.0 <= high
    assert 85 <= held <= 100


def test_block_interval_keeps_blocks_in_pairs(figures):
    """A variant that is twice as slow in every stretch of the trace has a ratio of exactly two."""
    blocks = [([2.0 * n, 4.0 * n], [1.0 * n, 2.0 * n]) for n in range(1, 9)]
    found = figures.block_ratio_interval(blocks, lambda values: figures.quantile(values, 0.99))
    assert found == pytest.approx((2.0, 2.0, 2.0))


def test_block_interval_of_unanswered_calls_is_not_hidden(figures):
    """Where the upper variant left calls unanswered the ratio is infinite."""
    blocks = [([1.0, math.inf], [1.0, 2.0])] * 4
    found = figures.block_ratio_interval(blocks, lambda values: figures.quantile(values, 0.99))
    assert found[0] == math.inf


@pytest.mark.parametrize(
    ("values", "expected"), [([3.0] * 9, 1.0), ([1.0] + [0.0] * 8, 1 / 9), ([1.0, 3.0], 0.8)]
)
def test_jain_index_runs_from_one_for_equals_to_one_nth(figures, values, expected):
    """The values of the index's definition."""
    assert figures.jain(values) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("process", "model", "of_one", "expected"),
    [(300, 200, False, 4), (300, 200, True, 3), (150, 200, False, 5)],
)
def test_copies_share_a_process_or_have_each_their_own(figures, process, model, of_one, expected):
    """In a room of 1,000: what a process takes beside its model counts once, or for each copy."""
    assert figures.copies_in(1000, process, model, of_one=of_one) == expected
