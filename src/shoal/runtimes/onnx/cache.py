"""Derived graphs on disk, so that a process that finds one does not load the graph library.

Owns the files: their names (a digest of all that the graph depends on), their checksums, and
writing them so that several processes may do it at once. Does not own the graphs (`graph`).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_CHECKSUM_BYTES = 32
MAX_GRAPHS = 256


def cached(folder: Path, kind: str, depends_on: str, build: Callable[[], bytes]) -> bytes:
    """The graph of `kind` for `depends_on`: from the folder, or built and kept there.

    A damaged file is built anew. Where the folder cannot be written the graph is built each time.
    """
    digest = hashlib.sha256(depends_on.encode()).hexdigest()[:24]
    path = folder / f"{kind}-{digest}.graph"
    graph = _read(path)
    if graph is None:
        graph = build()
        _write(path, graph)
    return graph


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    checksum, graph = data[:_CHECKSUM_BYTES], data[_CHECKSUM_BYTES:]
    if hashlib.sha256(graph).digest() != checksum:
        return None
    with suppress(OSError):
        os.utime(path)  # so that what is used is not the oldest
    return graph


def _forget_old(folder: Path) -> None:
    """Removes the graphs that were used longest ago, past `MAX_GRAPHS`."""
    graphs = sorted(folder.glob("*.graph"), key=lambda path: path.stat().st_mtime)
    for path in graphs[:-MAX_GRAPHS]:
        path.unlink(missing_ok=True)


def _write(path: Path, graph: bytes) -> None:
    """Writes beside and renames, so that a reader sees the old file or the whole new one."""
    beside = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(graph).digest() + graph)
        Path(beside).replace(path)
        _forget_old(path.parent)
    except OSError:
        # A cache that cannot be written costs time at the next load, nothing else.
        if beside:
            with suppress(OSError):
                Path(beside).unlink(missing_ok=True)
