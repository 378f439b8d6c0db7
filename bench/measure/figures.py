"""The statistics of the benchmarks: rates, quantiles, ratios with intervals.

Owns the arithmetic. Does not own measuring. Intervals are percentile bootstraps (Efron 1979) of
95 %, from a seeded generator, so that the same data give the same interval.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

RESAMPLES = 2_000
BURST_GAP_S = 0.010

Interval = tuple[float, float, float]


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least a share `q` of all do not exceed; NaN of nothing.

    Infinite values (calls without an answer) count as what they are.
    """
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[min(len(ordered), max(1, math.ceil(q * len(ordered)))) - 1]


def steady_rate(points: Sequence[tuple[float, float]], first: int, last: int) -> float:
    """Amount per second among (moment_s, amount) results, between two of them by number.

    Results of batches come in bursts, each at the end of the time that it took. So it is counted
    from the end of the burst that holds result `first` to the end of the one that holds `last`:
    between two other moments the count would be off by up to a batch. NaN when that is one burst.
    """
    ordered = sorted(points)

    def burst_end(at: int) -> int:
        while at + 1 < len(ordered) and ordered[at + 1][0] - ordered[at][0] < BURST_GAP_S:
            at += 1
        return at

    start, end = burst_end(first), burst_end(min(last, len(ordered) - 1))
    if start == end:
        return math.nan
    total = math.fsum(amount for _, amount in ordered[start + 1 : end + 1])
    return total / (ordered[end][0] - ordered[start][0])


def ratio_interval(pairs: Sequence[tuple[float, float]]) -> Interval:
    """Geometric mean of a/b over paired rounds (a, b), and its interval (middle, low, high).

    With a single pair the interval is that point.
    """
    logs = [math.log(a / b) for a, b in pairs]
    rng = random.Random(0)
    means = [math.fsum(rng.choices(logs, k=len(logs))) / len(logs) for _ in range(RESAMPLES)]
    middle = math.fsum(logs) / len(logs)
    return math.exp(middle), math.exp(quantile(means, 0.025)), math.exp(quantile(means, 0.975))


def block_ratio_interval(
    blocks: Sequence[tuple[Sequence[float], Sequence[float]]],
    statistic: Callable[[Sequence[float]], float],
) -> Interval:
    """`statistic` of all a's over that of all b's, for paired blocks (a's, b's), with interval.

    A block holds what the same stretch of the same trace did under two variants; blocks are drawn
    whole and in pairs, for what is near in time is not independent (Kuensch 1989).
    """

    def ratio(chosen: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
        upper = statistic([value for a, _ in chosen for value in a])
        return upper / statistic([value for _, b in chosen for value in b])

    rng = random.Random(0)
    ratios = [ratio(rng.choices(blocks, k=len(blocks))) for _ in range(RESAMPLES // 10)]
    ratios = [value for value in ratios if not math.isnan(value)]
    return ratio(blocks), quantile(ratios, 0.025), quantile(ratios, 0.975)


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness: 1 when all are equal, 1/n when one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else math.nan


def copies_in(room: float, process: float, model: float, *, of_one: bool) -> int:
    """How many copies of a model fit into a room, all in bytes or all in MiB.

    of_one: each copy has a process of its own; else one process, which is `process` with one copy
    in it, has them all. 0 where a load was not seen to take anything.
    """
    if not model:
        return 0
    if of_one:
        return int(room / process)
    return int((room - max(0.0, process - model)) / model)
