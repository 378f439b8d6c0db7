"""A runtime in its own process, as a worker has it: real host, real socket.

Owns starting it, in its bundle where it has one, and what is asked of it besides answers. Does not
own items and answers (`hosted`, `speaking`, `adapted`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from shoal.bundles.definition import read
from shoal.bundles.shelf import Home, Shelf
from shoal.catalog.resolve import model_spec
from shoal.catalog.schema import Entry
from shoal.ipc.client import RuntimeConnection
from shoal.ipc.messages import Hello, Loaded, Memory, ModelSpec
from shoal.worker.supervise import RuntimeProcess
from tests.contract.declared import OPTIONAL
from tests.support.bundle_builds import built
from tests.support.cache import cache_dir
from tests.support.pace import limit_s

T = TypeVar("T")

_CALL_S = 60.0
_LOAD_S = 300.0  # an engine that is a server of its own takes its time
_BUILD_S = 110.0


class Process:
    """One runtime process on one thread, in a loop of its own."""

    def __init__(self, runtime: str, folder: Path) -> None:
        self.runtime = runtime
        self.folder = folder
        self._loop = asyncio.Runner()
        self._process: RuntimeProcess | None = None
        bundles = cache_dir() / "bundles"
        self._shelf = Shelf(bundles, read())

    def start(self) -> None:
        """Starts it."""
        bundle = next(
            (b for b in self._shelf.bundles if self.runtime in b.definition.runtimes), None
        )
        if self.runtime in OPTIONAL and not (bundle and self._shelf.is_built(bundle)):
            pytest.skip(f"the bundle of {self.runtime} is not built here")
        if bundle is not None:
            self.wait(built(self._shelf, bundle), _BUILD_S)

        async def home() -> Home | None:
            return None if bundle is None else await self._shelf.home(bundle, lambda _: None)

        self._process = RuntimeProcess(
            self.runtime, device="cpu#0", threads=1, on_lost=lambda: None, home=home
        )
        self.wait(self._process.connection())

    def leave(self) -> None:
        """Stops it."""
        if self._process is not None:
            self.wait(self._process.stop())
        self._loop.close()

    def wait(self, call: Awaitable[T], most_s: float = _CALL_S) -> T:
        """What a call gives, in the loop of this process."""

        async def bounded() -> T:
            return await asyncio.wait_for(call, limit_s(most_s))

        return self._loop.run(bounded())

    @property
    def connection(self) -> RuntimeConnection:
        """The socket to it."""
        assert self._process is not None
        return self._process.live()

    @property
    def hello(self) -> Hello:
        """Who it says it is."""
        assert self._process is not None
        assert self._process.hello is not None
        return self._process.hello

    def memory(self) -> Memory:
        """What it says it holds."""
        return self.wait(self.connection.memory())

    def held_bytes(self) -> int:
        """Resident memory of the process."""
        return self.memory().process_bytes

    def thread_cpu_s(self) -> dict[int, float]:
        """Processor time that each thread of the process has used, by its id."""
        threads = psutil.Process(self.hello.pid).threads()
        return {one.id: one.user_time + one.system_time for one in threads}

    def spec(self, entry: Entry) -> ModelSpec:
        """What the runtime is told of an entry."""
        return model_spec(entry, cache_dir())

    def load(self, entry: Entry) -> Loaded:
        """Loads an entry's model."""
        return self.wait(self.connection.load(self.spec(entry)), _LOAD_S)

    def unload(self, entry: Entry, *, keep: bool = False) -> None:
        """Unloads it."""
        self.wait(self.connection.unload(entry.key, keep=keep))
