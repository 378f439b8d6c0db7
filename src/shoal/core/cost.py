"""What a batch costs: device seconds by its tokens, learnt while it runs.

    t = max(floor, a + b * padded_tokens + c * sum of squared lengths)

a is the launch of a pass, b the linear layers, c attention, and the floor the flat region in which
a device is not filled and a larger batch takes no longer. A straight line through that region is
the classic mistake: it makes small batches look cheap and large ones dear.

The three coefficients are fitted by recursive least squares with forgetting (Haykin, Adaptive
Filter Theory, ch. 10) on features scaled to about 1; an observation far from the prediction moves
them only as far as `CLIP` times the prediction, so one page fault or one noisy neighbour does not
bend the curve. The quantile is the estimate times a factor that is moved up and down so that
`QUANTILE` of the observations lie below it (Robbins and Monro 1951).

One model of cost belongs to one (model, device kind, runtime). Owns the estimate. Does not own
what is measured or where the state is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

QUANTILE = 0.95
CLIP = 3.0
_FORGET = 0.98
_SCALE = (1.0, 1_000.0, 250_000.0)
_FACTOR_STEP = 0.05
_FACTOR_MOST = 8.0
_FLOOR_RISE = 1.02
_PRIOR = 10.0
_TRUST_AFTER = 8


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
        self._w = [start.launch_s, start.token_s * _SCALE[1], start.square_s * _SCALE[2]]
        prior = _PRIOR if start.batches < _TRUST_AFTER else _PRIOR / 100
        self._p = [[prior if i == j else 0.0 for j in range(3)] for i in range(3)]
        self._floor_s = start.floor_s
        self._factor = start.factor
        self._batches = start.batches

    def state(self) -> CostState:
        """What is known now."""
        a, b, c = self._coefficients()
        return CostState(a, b, c, self._floor_s, self._factor, self._batches)

    def _coefficients(self) -> tuple[float, float, float]:
        """a, b and c, none of them negative, and b above zero."""
        a, b, c = (w / scale for w, scale in zip(self._w, _SCALE, strict=True))
        return max(a, 0.0), max(b, 1e-9), max(c, 0.0)

    def predict_s(self, work: Work) -> float:
        """Expected device seconds of a batch."""
        a, b, c = self._coefficients()
        return max(self._floor_s, a + b * work.padded_tokens + c * work.squares)

    def bound_s(self, work: Work) -> float:
        """Device seconds that `QUANTILE` of such batches keep within; for deadlines."""
        return self.predict_s(work) * self._factor

    def budget_tokens(self, allowed_s: float, length_tokens: int) -> int:
        """The most padded tokens, in sequences of about this length, that run in `allowed_s`."""
        a, b, c = self._coefficients()
        if allowed_s <= self._floor_s:
            return 0
        return max(0, int((allowed_s - a) / (b + c * length_tokens)))

    def observe(self, work: Work, took_s: float) -> None:
        """Learns from a batch that took `took_s` device seconds."""
        expected_s = self.predict_s(work)
        self._batches += 1
        learning = self._batches <= _TRUST_AFTER
        self._move_factor(expected_s, took_s)
        self._move_floor(took_s)
        # In the flat region a batch says nothing about the slope.
        x = [1.0 / _SCALE[0], work.padded_tokens / _SCALE[1], work.squares / _SCALE[2]]
        linear_s = sum(w * f for w, f in zip(self._w, x, strict=True))
        if linear_s < self._floor_s and took_s <= self._floor_s * 1.1:
            return
        error_s = took_s - linear_s
        if not learning:
            most_s = CLIP * max(expected_s, 1e-6)
            error_s = max(-most_s, min(most_s, error_s))
            if took_s > CLIP * max(expected_s, 1e-6):
                error_s *= 0.05  # an outlier: noticed, hardly believed
        p = self._p
        px = [sum(p[i][j] * x[j] for j in range(3)) for i in range(3)]
        gain_base = _FORGET + sum(xi * pxi for xi, pxi in zip(x, px, strict=True))
        gain = [v / gain_base for v in px]
        self._w = [w + g * error_s for w, g in zip(self._w, gain, strict=True)]
        self._p = [
            [min((p[i][j] - gain[i] * px[j]) / _FORGET, _PRIOR) for j in range(3)] for i in range(3)
        ]

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
