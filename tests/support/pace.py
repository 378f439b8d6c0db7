"""How slow this machine is at the moment, for the time limits of tests.

A limit in a test tells a fault (something hangs, or waits for what it should not) from a machine
that is slow or busy. So it is written as what a fast machine with nothing else to do needs at most,
and stretched by what was measured. Owns that measure. Does not own any limit.
"""

from __future__ import annotations

import hashlib
import os
import time

VARIABLE = "TEST_PACE"
# Seconds that `_work` takes on the machine of the limits: one core of a server of 2021, alone.
_USUAL_S = 0.035
_ROUNDS = 5
_MOST = 40.0


def measure(side_by_side: int = 1) -> float:
    """How many times longer things may take here, 1 at least; leaves it to child processes, too.

    side_by_side: how many tests run at once.
    """
    took_s = sorted(_work() for _ in range(_ROUNDS))[_ROUNDS // 2]
    crowd = max(1.0, side_by_side / (os.cpu_count() or 1))
    pace = min(_MOST, max(1.0, took_s / _USUAL_S) * crowd)
    os.environ[VARIABLE] = f"{pace:.2f}"
    return pace


def _work() -> float:
    """Seconds of wall time that some work takes, half of it in the interpreter."""
    begun_s = time.monotonic()
    block = bytes(1 << 16)
    total = 0
    for n in range(300):
        total += sum(range(n, n + 2_000))
        hashlib.sha256(block).digest()
    assert total > 0
    return time.monotonic() - begun_s


def limit_s(usual_s: float) -> float:
    """The limit for what takes a fast machine at most `usual_s`."""
    return usual_s * float(os.environ.get(VARIABLE) or measure())
