"""How much memory a model may need, before anybody has measured it.

Owns the guess: what the entry says, else the size of its weights on this machine. Does not own
measuring (the workers').
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from shoal.catalog.resolve import weights_files
from shoal.catalog.schema import Entry
from shoal.errors import ModelUnavailable

UNKNOWN_MIB = 256
_OVERHEAD_MIB = 24
_MIB = 1024 * 1024


def memory_mib(entry: Entry) -> int:
    """The guess in MiB; nothing is fetched for it."""
    if entry.memory_mib is not None:
        return entry.memory_mib
    try:
        files = weights_files(entry)
    except ModelUnavailable:
        return UNKNOWN_MIB
    size_bytes = sum(_size_bytes(path) for path in files)
    return _OVERHEAD_MIB + size_bytes // _MIB if size_bytes else UNKNOWN_MIB


@lru_cache(maxsize=4096)  # asked for at every look of a worker
def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
