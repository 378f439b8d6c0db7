"""Giving freed memory back to the system.

Owns that one call. A model's buffers are freed when it is unloaded, but the C library keeps their
pages for itself, and a process that seems to hold a model it has dropped would be evicted again.
"""

from __future__ import annotations

import ctypes
import gc
import sys


def give_back() -> None:
    """Collects garbage and lets the C library return its free pages, where it is glibc."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
