"""Giving freed memory back to the system, and to the device where torch keeps it.

Owns that one call. A model's buffers are freed when it is unloaded, but the C library keeps their
pages for itself, and a process that seems to hold a model it has dropped would be evicted again.
"""

from __future__ import annotations

import ctypes
import gc
import sys


def give_back() -> None:
    """Collects garbage, then returns free pages: of glibc's heap, and of torch's on CUDA."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
