"""Graphs as ONNX Runtime has prepared them: the host-memory tier of this runtime.

Most of a load is optimising the graph and repacking its matrices for the processor. What came of
that is written to disk when a model is evicted, and its next load maps the file: nothing is
computed again, and the weights lie in the system's page cache, which it takes back when it must
and which all processes share. The numbers are the same to the bit, for the same kernels read the
same matrices.

Owns the folders, their names (a digest of all that the prepared graph depends on) and their bound.
Does not own what is in them (`session`).
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import onnxruntime as ort
import psutil

GRAPH, DATA = "graph.onnx", "graph.data"
MAX_PREPARED_BYTES = 8 * 2**30


def place(cache_dir: Path, facts: str, weights_file: Path) -> Path:
    """Where the prepared graph of these facts and weights lies, or would lie."""
    beside = sorted(weights_file.parent.glob(f"{weights_file.name}*"))  # a graph's external data
    files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in beside]
    depends_on = repr((facts, files, ort.__version__, _machine()))
    return cache_dir / "prepared" / hashlib.sha256(depends_on.encode()).hexdigest()[:24]


def find(folder: Path) -> Path | None:
    """The graph file of a prepared graph, or None; what is used is not the oldest."""
    path = folder / GRAPH
    if not path.is_file():
        return None
    with suppress(OSError):
        os.utime(folder)
    return path


def make(folder: Path, write: Callable[[Path], None]) -> None:
    """Lets `write` fill a folder beside, and renames it, so that it is there whole or not at all.

    Where there is no room it stays away: the next load takes longer, nothing else.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=folder.parent, prefix="part-"))
    except OSError:
        return
    try:
        write(beside)
        beside.rename(folder)
    except OSError:
        shutil.rmtree(beside, ignore_errors=True)
    _forget_old(folder.parent)


def forget(folder: Path) -> None:
    """Removes a prepared graph; processes that have it mapped go on."""
    shutil.rmtree(folder, ignore_errors=True)


def _forget_old(root: Path) -> None:
    """Removes the graphs that were used longest ago, until the rest is within the bound."""
    held_bytes = 0
    for folder in sorted(root.iterdir(), key=_used_s, reverse=True):
        held_bytes += sum(path.stat().st_size for path in folder.iterdir())
        if held_bytes > MAX_PREPARED_BYTES:
            forget(folder)


def _used_s(folder: Path) -> float:
    return folder.stat().st_mtime


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
