"""Bundles for tests: small packages made by hand, builds, and runtime processes in them.

Holds no assertions.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shoal.bundles.definition import Bundle
from shoal.bundles.shelf import Home, Shelf
from shoal.errors import RuntimeUnavailable
from shoal.ipc.client import RuntimeConnection
from shoal.worker.supervise import RuntimeProcess

# What pip says where no index can be reached; the names of hosts are not in it.
_UNREACHED = ("Could not fetch URL", "NewConnectionError", "Temporary failure in name resolution")

ECHO = '''\
"""A runtime that says what its environment is."""
import os, sys, importlib.util
from shoal.ipc.messages import Traits
from shoal.runtimes.interface import RanItems
from shoal.wire.envelope import Result

class Echo:
    name, version = "echo", "7"
    traits = Traits(accepts_ids=False, tasks=["classify"])

    def __init__(self, *, device, threads):
        pass

    def load(self, spec):
        return False

    def unload(self, key, *, keep=False):
        pass

    def memory(self):
        return {}

    def run(self, key, items, block_tokens=None):
        torch = importlib.util.find_spec("torch")
        said = [os.environ.get("WORD"), os.environ.get("SHOAL_SECRET"), getattr(sys, "shim", None)]
        result = Result(labels=[str(each) for each in (*said, torch)])
        return RanItems([result for _ in items], 0)
'''


def wheel(folder: Path, project: str, module: str, entry_points: str = "") -> Path:
    """A wheel of one module, as pip installs it."""
    path = folder / f"{project}-1.0-py3-none-any.whl"
    info = f"{project}-1.0.dist-info"
    files = {
        f"{project}.py": module,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entry_points,
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in files))
    return path


def sha256(path: Path) -> str:
    """The digest of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


async def built(shelf: Shelf, bundle: Bundle) -> list[str]:
    """Builds a bundle; the steps. Skips where no index is reached, fails in CI."""
    steps: list[str] = []
    try:
        await shelf.home(bundle, steps.append)
    except RuntimeUnavailable as error:
        log = shelf.place(bundle).with_name(f"{shelf.place(bundle).name}.log")
        text = log.read_text("utf-8", "replace") if log.is_file() else ""
        if "CI" not in os.environ and any(sign in text for sign in _UNREACHED):
            pytest.skip(f"the package index cannot be reached: {error}")
        raise
    return steps


@asynccontextmanager
async def started(
    shelf: Shelf, bundle: Bundle, runtime: str
) -> AsyncIterator[tuple[RuntimeProcess, RuntimeConnection]]:
    """A runtime process in a bundle."""

    async def home() -> Home:
        return await shelf.home(bundle, lambda _: None)

    process = RuntimeProcess(runtime, device="cpu#0", threads=1, on_lost=lambda: None, home=home)
    try:
        yield process, await process.connection()
    finally:
        await process.stop()
