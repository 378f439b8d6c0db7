"""Rounds over several variants, and when there have been enough.

Owns the order and the time that a measurement may take. Does not own what a round does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence


def rounds(most: int, budget_s: float) -> Iterator[int]:
    """Numbers of rounds: one at least, then as long as one more like the longest so far fits."""
    begun_s = time.monotonic()
    longest_s = 0.0
    for number in range(most):
        round_s = time.monotonic()
        if number and round_s + longest_s > begun_s + budget_s:
            return
        yield number
        longest_s = max(longest_s, time.monotonic() - round_s)


def rotated(names: Sequence[str], number: int) -> list[str]:
    """The names in the order of a round: everyone is first in turn."""
    at = number % len(names)
    return [*names[at:], *names[:at]]
