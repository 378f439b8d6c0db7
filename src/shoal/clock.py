"""Time as an argument.

Owns the two clocks: `wall()` for deadlines that cross machines, `monotonic()` for durations.
Pure code takes `now` as a number; only shells call these.
"""

from __future__ import annotations

import time


def wall() -> float:
    """Seconds since the epoch; comparable between machines whose clocks are synchronised."""
    return time.time()


def monotonic() -> float:
    """Seconds on this machine's monotonic clock; only differences mean anything."""
    return time.monotonic()
