"""What must come before a model can be loaded: its files, and the environment of its runtime.

Owns fetching them, single flight for each model, in threads of its own: a download may take long,
and holds no device, no memory and nobody else's thread meanwhile. Does not own where files come
from (`shoal.catalog.resolve`), environments (`shoal.bundles`) or loading (`resident`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from shoal.bundles.build import OnStep
from shoal.bundles.shelf import Home, Shelf
from shoal.catalog.resolve import model_spec
from shoal.catalog.schema import Entry
from shoal.catalog.sources import is_remote
from shoal.clock import monotonic
from shoal.errors import ModelLoading, ModelUnavailable, ShoalError
from shoal.ipc.messages import ModelSpec
from shoal.worker.device import Loading
from shoal.worker.threads import Threads

log = logging.getLogger(__name__)

MAX_FETCHES = 4


class Fetches:
    """Fetches under way and done. on_end: told of a model and of what went wrong, if anything."""

    def __init__(
        self,
        cache_dir: Path,
        shelf: Shelf,
        on_end: Callable[[Entry, ShoalError | None], None],
    ) -> None:
        self.under_way: dict[str, Loading] = {}
        self._cache_dir = cache_dir
        self._shelf = shelf
        self._on_end = on_end
        self._here: set[tuple[str, str]] = set()
        self._given_up: dict[str, threading.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = Threads(MAX_FETCHES, "fetch")

    def is_here(self, entry: Entry) -> bool:
        """Whether nothing needs to be fetched or built any more, as far as is known."""
        bundle = self._shelf.of(entry.runtime)
        if bundle is not None and not self._shelf.is_built(bundle):
            return False
        return (entry.key, entry.source) in self._here or not is_remote(entry.source)

    def begin(self, entry: Entry) -> None:
        """Begins to fetch, unless that is under way."""
        if entry.key in self.under_way or len(self.under_way) >= MAX_FETCHES:
            return
        self.under_way[entry.key] = Loading(entry, monotonic(), "fetching")
        self._given_up[entry.key] = threading.Event()
        task = asyncio.create_task(self._fetch(entry), name=f"fetch {entry.key}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def give_up(self, key: str) -> None:
        """Nobody wants the model any more."""
        if key in self._given_up:
            self._given_up[key].set()

    async def _fetch(self, entry: Entry) -> None:
        loading, error = self.under_way[entry.key], None
        try:
            await self.home(entry.runtime, loading.on_building)
            await self._files(entry, loading)
        except ShoalError as raised:
            error = raised
        except Exception as raised:  # task root
            log.exception("fetching %s", entry.key)
            error = ModelUnavailable(f"{entry.key}: {type(raised).__name__}: {raised}")
        else:
            self._here.add((entry.key, entry.source))
            log.info("fetched %s in %.1f s", entry.key, monotonic() - loading.begun_s)
        finally:
            del self.under_way[entry.key]
            del self._given_up[entry.key]
        self._on_end(entry, error)

    async def _files(self, entry: Entry, loading: Loading) -> ModelSpec:
        given_up = self._given_up[entry.key]

        def on_progress(done_bytes: int, total_bytes: int) -> None:  # in the thread that fetches
            if given_up.is_set():
                raise ModelLoading(f"the fetch of {entry.key} was given up")
            share = f" {100 * done_bytes // total_bytes} %" if total_bytes else ""
            loading.phase = f"fetching{share}"

        return await self._threads.run(partial(model_spec, entry, self._cache_dir, on_progress))

    async def spec(self, entry: Entry) -> ModelSpec:
        """What the runtime is told of a model whose files are here. Raises `ModelUnavailable`."""
        return await asyncio.to_thread(model_spec, entry, self._cache_dir)

    async def home(self, runtime: str, on_step: OnStep = lambda _: None) -> Home | None:
        """Where a runtime starts; a bundle that is not built yet is, which may take long."""
        bundle = self._shelf.of(runtime)
        return await self._shelf.home(bundle, on_step) if bundle is not None else None

    async def close(self) -> None:
        """Ends what is under way; a thread that cannot be ended is left."""
        for given_up in self._given_up.values():
            given_up.set()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
