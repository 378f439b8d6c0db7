"""Standing back: how far this process's work comes after that of others.

Linux shares the cores out among sessions first (autogroups, sched(7)), and a process's priority
counts only within its own. Ours have a session each, so the session has to stand back as well.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_OF_SESSION = Path("/proc/self/autogroup")


def stand_back(steps: int) -> None:
    """Lowers the priority of this process, its later threads and children by 0 to 19 steps.

    Call it before any thread is there: each has a priority of its own.
    """
    _session_too(os.nice(steps))


def stand_back_alike() -> None:
    """Lets a session that is new stand back as far as the process does that began it."""
    _session_too(os.nice(0))


def _session_too(level: int) -> None:
    if level > 0:
        with contextlib.suppress(OSError):  # other systems, and containers with groups of their own
            _OF_SESSION.write_text(str(level), encoding="ascii")
