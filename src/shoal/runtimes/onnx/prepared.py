"""Graphs as ONNX Runtime has prepared them: the host-memory tier of this runtime.

Most of a load is optimising the graph and repacking its matrices for the processor. What came of
that is written to disk when a model is evicted, and its next load maps the file: nothing is
computed again, and the weights lie in the system's page cache, which it takes back when it must
and which all processes share. The numbers are the same to the bit, for the same kernels read the
same matrices.

Owns the folders, their names (a digest of all that the prepared graph depends on) and their bound.
Several processes share them, and nothing that is wrong with them is an error: it costs time at the
next load. Does not own what is in them (`session`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from glob import escape
from pathlib import Path

import onnxruntime as ort
import psutil

from shoal.clock import wall

log = logging.getLogger(__name__)

GRAPH, DATA = "graph.onnx", "graph.data"
MAX_PREPARED_BYTES = 8 * 2**30
_UNFINISHED = "part-"
_ABANDONED_S = 3_600.0  # nobody writes for so long: its process has died


def place(cache_dir: Path, facts: str, weights_file: Path) -> Path | None:
    """Where the prepared graph of these facts and weights lies, or would lie.

    None where the weights cannot be looked at: what cannot be told apart is not kept.
    """
    try:
        # A graph's external data lies beside it.
        beside = sorted(weights_file.parent.glob(f"{escape(weights_file.name)}*"))
        files = [(str(path.resolve()), *_version(path)) for path in beside]
    except OSError as error:
        log.warning("nothing is kept of %s: %s", weights_file, error)
        return None
    depends_on = repr((facts, files, ort.__version__, _machine()))
    return cache_dir / "prepared" / hashlib.sha256(depends_on.encode()).hexdigest()[:24]


def _version(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns


def find(folder: Path) -> Path | None:
    """The graph file of a prepared graph, or None; what is used is not the oldest."""
    path = folder / GRAPH
    try:
        if not path.is_file():
            return None
        os.utime(folder)
    except OSError as error:
        log.debug("%s: %s", folder, error)
        return None
    return path


def make(folder: Path, write: Callable[[Path], None]) -> None:
    """Lets `write` fill a folder beside, and renames it, so that it is there whole or not at all.

    Where there is no room it stays away: the next load takes longer, nothing else. Several
    processes may do the same at once; the first one's is kept.
    """
    beside: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=_UNFINISHED))
        write(beside)
        if find(folder) is None:
            forget(folder)  # what is left of one that was damaged
        beside.rename(folder)
    except OSError as error:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)
        if find(folder) is None:
            log.warning("a prepared graph is not kept in %s: %s", folder.parent, error)
    _forget_old(folder.parent)


def forget(folder: Path) -> None:
    """Removes a prepared graph; processes that have it mapped go on."""
    with suppress(OSError):
        (folder / GRAPH).unlink()  # first, so that nobody finds a part of it
    shutil.rmtree(folder, ignore_errors=True)


def _forget_old(root: Path) -> None:
    """Removes the graphs that were used longest ago, until the rest is within the bound.

    What other processes write at the moment is left alone; what they remove or rename meanwhile is
    passed over.
    """
    held: list[tuple[float, int, Path]] = []
    with suppress(OSError):
        for folder in root.iterdir():
            with suppress(OSError):
                used_s = folder.stat().st_mtime
                if folder.name.startswith(_UNFINISHED) and wall() - used_s < _ABANDONED_S:
                    continue
                size_bytes = sum(path.stat().st_size for path in folder.iterdir())
                held.append((used_s, size_bytes, folder))
    held_bytes = 0
    for _, size_bytes, folder in sorted(held, reverse=True):
        held_bytes += size_bytes
        if held_bytes > MAX_PREPARED_BYTES:
            forget(folder)


@cache
def _machine() -> str:
    """The processor, which the matrices were packed for, and the machine's last start.

    Nothing is forced to the disk, so files that were there before a machine stopped are not
    trusted after it; and the page cache, which makes them quick, has not outlived it either.
    """
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return f"{psutil.boot_time():.0f} {platform.machine()} {platform.processor()}"
    able = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return f"{started} {sorted(able)}"
