"""What a batch costs: device seconds by its tokens, learnt while it runs.

    t = max(floor, a + b * padded_tokens + c * sum of squared lengths)

a is the launch of a pass, b the linear layers, c attention, and the floor the flat region in which
a device is not filled and a larger batch takes no longer. A straight line through that region is
the classic mistake: it makes small batches look cheap and large ones dear.

The three coefficients are the non-negative least squares fit (Lawson and Hanson 1974) of relative
errors over the observations, older ones forgotten by and by, with a pull towards what was believed
at the start that a few observations outweigh. With three unknowns the exact solution is the best of
the seven sets of them that may be above zero. An observation far above the prediction is believed
only in part and counts little, so one page fault or one noisy neighbour does not bend the curve.
The quantile is the estimate times a factor that is moved up and down so that `QUANTILE` of the
observations lie below it (Robbins and Monro 1951).

What is believed can be wrong as a whole: a state that was stored while something else kept the
device busy, or a device that has become another. When `CONTRADICTIONS` batches in a row are all far
above, or all far below, the estimate is dropped: it is scaled to them and learnt anew from there.

One model of cost belongs to one (model, device kind, runtime). Owns the estimate. Does not own
what is measured or where the state is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

QUANTILE = 0.95
CLIP = 3.0
CONTRADICTIONS = 4
FULL = 0.95
_FORGET = 0.98
_OUTLIER_WEIGHT = 0.1
_GUESS_PULL = 0.05
_KNOWN_PULL = 1.0
_SUBSETS = ((0, 1, 2), (0, 1), (1, 2), (0, 2), (1,), (0,), (2,))
_FACTOR_STEP = 0.05
_FACTOR_MOST = 8.0
_FLOOR_RISE = 1.02
_TRUST_AFTER = 8
_TYPICAL_TOKENS = 500


@dataclass(frozen=True, slots=True)
class Work:
    """What the device computes for a batch: padded tokens, and squared lengths with padding."""

    padded_tokens: int
    squares: int

    @classmethod
    def of_blocks(cls, blocks: Sequence[Sequence[int]]) -> Work:
        """The work of padded blocks, each given as the lengths of its sequences."""
        sizes = [(max(block), len(block)) for block in blocks if block]
        return cls(sum(n * m for n, m in sizes), sum(n * n * m for n, m in sizes))

    @classmethod
    def of_packed(cls, lengths_tokens: Sequence[int]) -> Work:
        """The work of sequences that run without padding."""
        return cls(sum(lengths_tokens), sum(n * n for n in lengths_tokens))


@dataclass(frozen=True, slots=True)
class CostState:
    """What a cost model knows, to be kept, sent and started from. Seconds, and seconds per token.

    batches: how many observations it rests on; 0 is a guess.
    """

    launch_s: float
    token_s: float
    square_s: float = 0.0
    floor_s: float = 0.0
    factor: float = 1.5
    batches: int = 0


class CostModel:
    """One (model, device, runtime)'s cost of batches."""

    def __init__(self, start: CostState) -> None:
        token_s = max(start.token_s, 1e-9)
        self._floor_s = start.floor_s
        self._factor = start.factor
        self._batches = start.batches
        self._begin(
            [start.launch_s, token_s, start.square_s],
            _KNOWN_PULL if start.batches >= _TRUST_AFTER else _GUESS_PULL,
        )

    def _begin(self, w: list[float], pull: float) -> None:
        """Sets out from coefficients that are believed as much as `pull` says."""
        launch_s, token_s, square_s = w
        # Sizes at which each coefficient would be surprising.
        sizes = [max(launch_s, 10 * token_s), token_s, max(square_s, token_s / _TYPICAL_TOKENS)]
        self._w = list(w)
        self._pull = [pull / size**2 for size in sizes]
        self._start = list(w)
        self._xx = [[0.0] * 3 for _ in range(3)]
        self._xt = [0.0] * 3
        self._against: list[float] = []

    def state(self) -> CostState:
        """What is known now."""
        a, b, c = self._w
        return CostState(a, b, c, self._floor_s, self._factor, self._batches)

    def predict_s(self, work: Work) -> float:
        """Expected device seconds of a batch."""
        a, b, c = self._w
        return max(self._floor_s, a + b * work.padded_tokens + c * work.squares)

    def bound_s(self, work: Work) -> float:
        """Device seconds that `QUANTILE` of such batches keep within; for deadlines."""
        return self.predict_s(work) * self._factor

    def budget_tokens(self, allowed_s: float, length_tokens: int) -> int:
        """The most padded tokens, in sequences of about this length, that run in `allowed_s`.

        No batch is shorter than the floor: what fits into that costs nothing more.
        """
        a, b, c = self._w
        return max(0, int((max(allowed_s, self._floor_s) - a) / (b + c * length_tokens)))

    def full_s(self) -> float:
        """Device seconds of the shortest batch that runs at `FULL` of the device's best rate.

        A batch of n tokens, each of slope s, takes max(floor, a + s n), and its rate is that share
        of the best one which s n is of the time. 0 while too little was measured.
        """
        if self._batches < _TRUST_AFTER:
            return 0.0
        return max(self._floor_s, self._w[0] / (1.0 - FULL))

    def observe(self, work: Work, took_s: float) -> None:
        """Learns from a batch that took `took_s` device seconds."""
        took_s = max(took_s, 1e-6)
        expected_s = self._unless_contradicted(self.predict_s(work), took_s)
        self._batches += 1
        self._move_factor(expected_s, took_s)
        self._move_floor(took_s)
        a, b, c = self._w
        linear_s = a + b * work.padded_tokens + c * work.squares
        if linear_s < self._floor_s and took_s <= self._floor_s * 1.1:
            return  # in the flat region a batch says nothing about the slope
        weight = 1.0
        if self._batches > _TRUST_AFTER and not expected_s / CLIP <= took_s <= CLIP * expected_s:
            took_s, weight = min(max(took_s, expected_s / CLIP), CLIP * expected_s), _OUTLIER_WEIGHT
        x = (1.0, float(work.padded_tokens), float(work.squares))
        weight /= took_s**2  # relative errors: small batches count as much as large ones
        for i in range(3):
            self._xt[i] = _FORGET * self._xt[i] + weight * x[i] * took_s
            for j in range(3):
                self._xx[i][j] = _FORGET * self._xx[i][j] + weight * x[i] * x[j]
        self._w = self._solve()

    def _unless_contradicted(self, expected_s: float, took_s: float) -> float:
        """Drops an estimate that batches contradict; the expectation that holds then."""
        ratio = took_s / expected_s
        far = not 1 / CLIP <= ratio <= CLIP
        same_side = not self._against or (ratio > 1) == (self._against[0] > 1)
        self._against = [*(self._against if same_side else []), ratio] if far else []
        if len(self._against) < CONTRADICTIONS:
            return expected_s
        scale = sorted(self._against)[CONTRADICTIONS // 2]
        self._begin([max(each * scale, 0.0) for each in self._w], _GUESS_PULL)
        self._w[1] = self._start[1] = max(self._w[1], 1e-9)
        self._floor_s *= scale
        self._batches = 0
        return expected_s * scale

    def _solve(self) -> list[float]:
        """The non-negative coefficients that fit best; the slope stays above zero."""
        matrix = [
            [self._xx[i][j] + (self._pull[i] if i == j else 0.0) for j in range(3)]
            for i in range(3)
        ]
        right = [self._xt[i] + self._pull[i] * self._start[i] for i in range(3)]
        best, least = self._w, float("inf")
        for chosen in _SUBSETS:
            part = _solve_part(matrix, right, chosen)
            if part is None or min(part) < 0.0:
                continue
            w = [0.0] * 3
            for at, value in zip(chosen, part, strict=True):
                w[at] = value
            # The minimum of the quadratic on its support is -w.right.
            loss = -sum(w[i] * right[i] for i in chosen)
            if loss < least:
                best, least = w, loss
        return [best[0], max(best[1], 1e-9), best[2]]

    def _move_factor(self, expected_s: float, took_s: float) -> None:
        """Up by much when a batch is above, down by little when it is below."""
        above = took_s > expected_s * self._factor
        step = _FACTOR_STEP * (QUANTILE if above else QUANTILE - 1.0)
        self._factor = min(_FACTOR_MOST, max(1.0, self._factor * (1.0 + step)))

    def _move_floor(self, took_s: float) -> None:
        """Follows the shortest batches down at once, and up slowly."""
        if self._floor_s == 0.0 or took_s < self._floor_s:
            self._floor_s = took_s
        else:
            self._floor_s = min(self._floor_s * _FLOOR_RISE, took_s)


def _solve_part(
    matrix: Sequence[Sequence[float]], right: Sequence[float], chosen: Sequence[int]
) -> list[float] | None:
    """Solves the rows and columns `chosen` by elimination; None where they are singular."""
    rows = [[matrix[i][j] for j in chosen] + [right[i]] for i in chosen]
    n = len(chosen)
    for k in range(n):
        pivot = max(range(k, n), key=lambda r: abs(rows[r][k]))
        rows[k], rows[pivot] = rows[pivot], rows[k]
        if rows[k][k] == 0.0:
            return None
        for r in range(k + 1, n):
            factor = rows[r][k] / rows[k][k]
            rows[r] = [v - factor * u for v, u in zip(rows[r], rows[k], strict=True)]
    solved = [0.0] * n
    for k in range(n - 1, -1, -1):
        known = sum(rows[k][j] * solved[j] for j in range(k + 1, n))
        solved[k] = (rows[k][n] - known) / rows[k][k]
    return solved
