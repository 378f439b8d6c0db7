"""What processes hold of the host's memory: this one, and those that it has started.

Owns the measure. Does not own a device's memory (`device`) or what is made of the numbers (`host`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import psutil


def held_bytes(process: psutil.Process) -> int:
    """What this very process holds: its resident set, and the shares of its children.

    An engine may be a server of several processes. Without children it is one cheap look.
    """
    own_bytes = int(process.memory_info().rss)
    return (
        own_bytes + shares_bytes(process.children(recursive=True)) if _has_children() else own_bytes
    )


def shares_bytes(processes: Iterable[psutil.Process]) -> int:
    """What processes hold together: pages that several have count once, where the system tells.

    One that is gone has none.
    """
    total_bytes = 0
    for process in processes:
        try:
            full = process.memory_full_info()
        except psutil.Error:
            continue
        total_bytes += int(getattr(full, "pss", full.rss))
    return total_bytes


def _has_children() -> bool:
    """Whether this process has any: looking for them reads the state of all processes there are."""
    if not hasattr(os, "waitid"):
        return True
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # ends and reaps nothing
    except ChildProcessError:
        return False
    return True
