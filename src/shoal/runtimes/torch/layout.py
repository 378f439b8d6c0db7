"""Which layout is the faster one here: sequences end to end, or padded rows of like lengths.

It depends on the machine, its threads and the model, so it is measured at the load, within a third
of a second, on lengths as short texts have them; the choice is kept beside the model's other
derived files. Owns that measurement. Does not own the layouts (`network`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from shoal.clock import monotonic
from shoal.core.batching import partition
from shoal.runtimes.onnx.cache import cached
from shoal.runtimes.pooling import Hidden
from shoal.runtimes.sequences import Limits, TokenSequence

BUDGET_S = 0.3
# Tokens of a ragged batch: eighths of a lognormal distribution with a mean near fifty.
LENGTHS = (12, 90, 24, 36, 150, 48, 18, 64)
_ROUNDS = 2
# Packed is the choice unless padded is clearly faster: packed, no batch waits for like lengths.
_GAIN = 1.05


class Measured(Protocol):
    """A network that runs either layout."""

    packs: bool
    limits: Limits

    def hidden(self, group: Sequence[TokenSequence]) -> Hidden:
        """Hidden states of a group."""


def packs_better(network: Measured, budget_tokens: int, folder: Path, depends_on: str) -> bool:
    """Whether packed is the faster layout, from the folder or measured and kept there."""

    def measure() -> bytes:
        return b"packed" if _measure(network, budget_tokens) else b"padded"

    return cached(folder, "layout", depends_on, measure) == b"packed"


def _measure(network: Measured, budget_tokens: int) -> bool:
    longest = min(network.limits.tokens, budget_tokens)
    lengths = [min(length, longest) for length in LENGTHS]
    network.packs = True
    token_s = min(_timed_s(network, lengths[:1], budget_tokens) for _ in range(2)) / lengths[0]
    # A pass of each layout in every round, after those short ones.
    affordable = BUDGET_S / (2 * _ROUNDS) / token_s
    few = [length for at, length in enumerate(lengths) if sum(lengths[: at + 1]) <= affordable]
    if len(few) < 3:
        return True  # so slow that a launch more or less is not seen
    best_s = {True: float("inf"), False: float("inf")}
    for _ in range(_ROUNDS):
        for packs in (True, False):
            network.packs = packs
            best_s[packs] = min(best_s[packs], _timed_s(network, few, budget_tokens))
    return best_s[True] <= best_s[False] * _GAIN


def _timed_s(network: Measured, lengths: Sequence[int], budget_tokens: int) -> float:
    """Seconds that sequences of those lengths take in the network's present layout."""
    ordered = sorted(lengths)
    begun_s = monotonic()
    groups = [range(len(ordered))] if network.packs else partition(ordered, budget_tokens)
    for group in groups:
        network.hidden([TokenSequence(np.zeros(ordered[i], "<u2").tobytes(), 2) for i in group])
    return monotonic() - begun_s
