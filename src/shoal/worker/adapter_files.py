"""The files of adapters on this machine, and what is wrong with an adapter.

Owns looking for an adapter's files and fetching them, single flight for each, and for how long a
fault of one is believed. Does not own where files come from (`shoal.catalog.adapters`), what is
loaded, or when (`adapters`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from shoal.catalog.adapters import adapter_folder
from shoal.catalog.schema import Adapter
from shoal.catalog.sources import is_remote
from shoal.clock import monotonic
from shoal.errors import (
    Bug,
    ModelLoading,
    ModelUnavailable,
    OutOfMemory,
    RuntimeCrashed,
    RuntimeFault,
    ShoalError,
    UnknownModel,
)
from shoal.ipc.messages import AdapterSpec
from shoal.wire.envelope import Failure
from shoal.worker.faults import cool_down_s
from shoal.worker.threads import Threads

log = logging.getLogger(__name__)

MAX_ADAPTER_FETCHES = 4
# Items that wait for a fetch are in no line's window: these are all that the worker holds.
MAX_AWAITING_ADAPTERS = 256
# A gateway may know of an adapter sooner than this worker.
NEWS_S = 3.0

Faults = dict[str, ShoalError]


class AdapterFiles:
    """All adapters of a worker. known: the adapter of a key, as the catalog has it now."""

    def __init__(self, known: Callable[[str], Adapter | None], cache_dir: Path) -> None:
        self._known = known
        self._cache_dir = cache_dir
        self._here: set[str] = set()
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._faults: dict[str, tuple[Failure, float]] = {}
        self._news = asyncio.Event()
        self._awaiting = 0
        self._is_closing = False
        self._fetches = Threads(MAX_ADAPTER_FETCHES, "adapter fetch")
        self._looks = Threads(1, "adapter")  # what is on a disk waits for no store

    def is_known(self, key: str) -> bool:
        """Whether the catalog has it."""
        return self._known(key) is not None

    def is_near(self, key: str) -> bool:
        """Whether its files are here and nothing is wrong with it, as far as is known."""
        return self.is_known(key) and self.fault(key) is None and key in self._here

    async def fetch(self, key: str) -> None:
        """Waits until an adapter's files are here.

        Raises `UnknownModel` where the catalog does not have it, `ModelLoading` where too many
        items wait already, and what kept the files from coming.
        """
        if self._awaiting >= MAX_AWAITING_ADAPTERS:
            raise ModelLoading(f"{self._awaiting} requests wait for adapters", retry_after_s=1.0)
        self._awaiting += 1
        try:
            adapter = await self._adapter(key)
            fault = self.fault(key)
            if fault is not None:
                raise fault
            if key in self._here:
                return
            fetching = self._fetching.get(key)
            if fetching is None:
                fetching = asyncio.create_task(self._fetch(adapter), name=f"fetch {key}")
                fetching.add_done_callback(_heard)
                self._fetching[key] = fetching
            await asyncio.shield(fetching)
        finally:
            self._awaiting -= 1

    async def _adapter(self, key: str) -> Adapter:
        give_up_s = monotonic() + NEWS_S
        while (adapter := self._known(key)) is None:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), give_up_s - monotonic())
            except TimeoutError as error:
                raise _unknown(key) from error
        return adapter

    async def _fetch(self, adapter: Adapter) -> None:
        begun_s = monotonic()

        def on_progress(done_bytes: int, total_bytes: int) -> None:  # noqa: ARG001 nobody is told
            if self._is_closing or self._known(adapter.key) is None:
                raise ModelLoading(f"the fetch of {adapter.key} was given up")

        threads = self._fetches if is_remote(adapter.source) else self._looks
        try:
            await threads.run(partial(adapter_folder, adapter, self._cache_dir, on_progress))
        except ShoalError as error:
            raise self.on_fault(adapter.key, error) from error
        except Exception as error:  # task root
            log.exception("fetching %s", adapter.key)
            unknown = ModelUnavailable(f"{type(error).__name__}: {error}")
            raise self.on_fault(adapter.key, unknown) from error
        finally:
            del self._fetching[adapter.key]
        self._here.add(adapter.key)
        log.info("adapter %s is here after %.1f s", adapter.key, monotonic() - begun_s)

    async def specs(self, keys: Iterable[str]) -> tuple[dict[str, AdapterSpec], Faults]:
        """What a runtime is told of adapters that it is to load, their files compared."""
        faults: Faults = {}
        adapters: list[Adapter] = []
        for key in keys:
            adapter, fault = self._known(key), self.fault(key)
            if adapter is None or fault is not None:
                faults[key] = fault or _unknown(key)
            else:
                adapters.append(adapter)
        if not adapters:
            return {}, faults
        folders = await self._looks.run(partial(_folders, adapters, self._cache_dir))
        specs: dict[str, AdapterSpec] = {}
        for adapter, folder in zip(adapters, folders, strict=True):
            if isinstance(folder, ShoalError):
                faults[adapter.key] = self.on_fault(adapter.key, folder)
            else:
                specs[adapter.key] = AdapterSpec(adapter.key, str(folder))
        return specs, faults

    def fault(self, key: str) -> ShoalError | None:
        """What is wrong with an adapter, as far as it is still believed."""
        failure, until_s = self._faults.get(key, (None, 0.0))
        return failure.error() if failure is not None and monotonic() < until_s else None

    def on_fault(self, key: str, cause: ShoalError) -> ShoalError:
        """Believes for a while that an adapter cannot be had, if it is its own fault.

        Whatever it is, no item is the culprit.
        """
        error = cause
        if isinstance(cause, Bug | OutOfMemory | RuntimeCrashed):
            error = ModelUnavailable(f"adapter {key} does not load: {cause.message}")
        elif key not in cause.message:
            error = replace(Failure.of(cause), message=f"adapter {key}: {cause.message}").error()
        if isinstance(error, RuntimeFault):
            error.retry_after_s = cool_down_s(cause)
            self._faults[key] = (Failure.of(error), monotonic() + error.retry_after_s)
            self._here.discard(key)
        log.error("%s", error)
        return error

    def faulty(self, model: str) -> list[str]:
        """The adapters of a model (by its id) that cannot be had here just now."""
        return [k for k in self._faults if k.startswith(f"{model}@") and self.fault(k) is not None]

    def on_catalog(self) -> None:
        """The catalog may have changed: what was waited for comes, what is gone is forgotten."""
        self._news.set()
        for key in [key for key in (*self._faults, *self._here) if not self.is_known(key)]:
            self._faults.pop(key, None)
            self._here.discard(key)

    async def close(self) -> None:
        """Ends what is under way; a thread that cannot be ended is left."""
        self._is_closing = True
        tasks = list(self._fetching.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _heard(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # whoever waits for it, if anybody does, has it


def _folders(adapters: Sequence[Adapter], cache_dir: Path) -> list[Path | ShoalError]:
    """Where the files of each lie, or why not. Runs in a thread."""
    found: list[Path | ShoalError] = []
    for adapter in adapters:
        try:
            found.append(adapter_folder(adapter, cache_dir))
        except ShoalError as error:
            found.append(error)
    return found


def _unknown(key: str) -> UnknownModel:
    return UnknownModel(f"there is no adapter {key} any more", param="model")
