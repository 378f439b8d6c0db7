"""LoRA adapters on the copies of their models.

Owns bringing an adapter's files here, loading it beside a copy before what needs it runs, keeping
it there while it is in use, and letting an adapter that cannot be had fail only its own items. What
is loaded goes with its copy: a copy that was evicted, or lost with its process, has none when it
comes back. Does not own which ones stay (`shoal.core.adapters`), where files come from
(`shoal.catalog.adapters`) or copies (`resident`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shoal.catalog.adapters import adapter_folder
from shoal.catalog.schema import Adapter, Entry
from shoal.catalog.sources import is_remote
from shoal.clock import monotonic
from shoal.core.adapters import MAX_RESIDENT_ADAPTERS, Moves, ResidentAdapters, parted
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
from shoal.ipc.client import RuntimeConnection
from shoal.ipc.messages import AdapterSpec, ItemDone, Ran, RunItem
from shoal.wire.envelope import AdapterState, Failure
from shoal.wire.generation import Generated, Piece
from shoal.worker.device import Device, Loaded
from shoal.worker.faults import cool_down_s

log = logging.getLogger(__name__)

MAX_ADAPTER_FETCHES = 4
# Items that wait for a fetch are in no line's window: these are all that the worker holds.
MAX_AWAITING_ADAPTERS = 256
# A gateway may know of an adapter sooner than this worker.
NEWS_S = 3.0

Faults = dict[str, ShoalError]


@dataclass(slots=True)
class _Copy:
    """A copy and its adapters. turn: who changes what is loaded, one after the other."""

    loaded: Loaded
    adapters: ResidentAdapters = field(default_factory=ResidentAdapters)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    freed: asyncio.Event = field(default_factory=asyncio.Event)


class Adapters:
    """All adapters of a worker. known: the adapter of a key, as the catalog has it now."""

    def __init__(self, known: Callable[[str], Adapter | None], cache_dir: Path) -> None:
        self._known = known
        self._cache_dir = cache_dir
        self._copies: dict[tuple[str, str], _Copy] = {}
        self._fetched: set[str] = set()
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._faults: dict[str, tuple[Failure, float]] = {}
        self._news = asyncio.Event()
        self._awaiting = 0
        self._is_closing = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pool = ThreadPoolExecutor(MAX_ADAPTER_FETCHES, thread_name_prefix="adapter")

    # --- files

    def is_near(self, key: str) -> bool:
        """Whether nothing has to be fetched before it can be loaded, as far as is known."""
        adapter = self._known(key)
        if adapter is None or self._fault(key) is not None:
            return False
        return key in self._fetched or not is_remote(adapter.source)

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
            fault = self._fault(key)
            if fault is not None:
                raise fault
            if key in self._fetched or not is_remote(adapter.source):
                return
            if key not in self._fetching:
                self._fetching[key] = self._spawn(self._fetch(adapter), f"fetch {key}")
            await asyncio.shield(self._fetching[key])
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

        work = partial(adapter_folder, adapter, self._cache_dir, on_progress)
        try:
            await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except ShoalError as error:
            raise self._on_fault(adapter.key, error) from error
        except Exception as error:  # task root
            log.exception("fetching %s", adapter.key)
            unknown = ModelUnavailable(f"{type(error).__name__}: {error}")
            raise self._on_fault(adapter.key, unknown) from error
        finally:
            del self._fetching[adapter.key]
        self._fetched.add(adapter.key)
        log.info("fetched %s in %.1f s", adapter.key, monotonic() - begun_s)

    def _fault(self, key: str) -> ShoalError | None:
        failure, until_s = self._faults.get(key, (None, 0.0))
        return failure.error() if failure is not None and monotonic() < until_s else None

    def _on_fault(self, key: str, error: ShoalError) -> ShoalError:
        """Believes for a while that an adapter cannot be had, if it is its own fault."""
        if key not in error.message:
            error = type(error)(f"adapter {key}: {error.message}")
        if isinstance(error, RuntimeFault):
            error.retry_after_s = cool_down_s(error)
            self._faults[key] = (Failure.of(error), monotonic() + error.retry_after_s)
            self._fetched.discard(key)
        log.error("%s", error)
        return error

    # --- beside a copy

    async def run(
        self,
        device: Device,
        entry: Entry,
        connection: RuntimeConnection,
        items: list[RunItem],
        block_tokens: int | None,
    ) -> Ran:
        """Runs a batch, each item with its adapter; one whose adapter cannot be had fails alone.

        A batch with more adapters than a copy has at once runs in parts. Raises what the
        connection raises.
        """
        if not any(item.adapter for item in items):
            return await connection.run(entry.key, items, block_tokens)
        done: dict[str, ItemDone] = {}
        run_s, padded_tokens = 0.0, 0
        for places in parted([item.adapter for item in items], most_adapters(entry)):
            part = [items[at] for at in places]
            keys = {item.adapter for item in part if item.adapter}
            async with self._in_use(device, entry, connection, keys) as faults:
                well = [item for item in part if item.adapter not in faults]
                if well:
                    ran = await connection.run(entry.key, well, block_tokens)
                    run_s, padded_tokens = run_s + ran.run_s, padded_tokens + ran.padded_tokens
                    done |= {each.item: each for each in ran.items}
                for item in part:
                    if item.adapter in faults:
                        failure = Failure.of(faults[item.adapter])
                        done[item.item] = ItemDone(item.item, failure=failure)
        return Ran(0, [done[item.item] for item in items], run_s, padded_tokens)

    async def generate(
        self,
        device: Device,
        entry: Entry,
        connection: RuntimeConnection,
        item: RunItem,
        on_piece: Callable[[Piece], None],
    ) -> Generated:
        """Generates for an item with its adapter; raises why that cannot be had."""
        if not item.adapter:
            return await connection.generate(entry.key, item, on_piece)
        async with self._in_use(device, entry, connection, {item.adapter}) as faults:
            if item.adapter in faults:
                raise faults[item.adapter]
            return await connection.generate(entry.key, item, on_piece)

    @asynccontextmanager
    async def _in_use(
        self, device: Device, entry: Entry, connection: RuntimeConnection, keys: set[str]
    ) -> AsyncIterator[Faults]:
        """Has adapters beside a copy for as long as they are used; why some are not there."""
        copy = self._copy(device, entry)
        taking = self._spawn(self._take(copy, entry, connection, keys), f"adapters of {entry.key}")
        try:
            faults = await asyncio.shield(taking)
        except asyncio.CancelledError:
            # What has begun to load is not left half known.
            taking.add_done_callback(lambda task: self._give_taken(copy, keys, task))
            raise
        try:
            yield faults
        finally:
            self._give(copy, keys - faults.keys())

    def _give_taken(self, copy: _Copy, keys: set[str], task: asyncio.Task[Faults]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._give(copy, keys - task.result().keys())

    def _give(self, copy: _Copy, keys: set[str]) -> None:
        copy.adapters.unpin(keys, monotonic())
        copy.freed.set()

    def _copy(self, device: Device, entry: Entry) -> _Copy:
        loaded = device.resident.get(entry.key)
        if loaded is None:
            raise RuntimeCrashed(f"{entry.key} is not on {device.name} any more")
        copy = self._copies.get((device.name, entry.key))
        if copy is None or copy.loaded is not loaded:
            copy = self._copies[device.name, entry.key] = _Copy(loaded)
        return copy

    async def _take(
        self, copy: _Copy, entry: Entry, connection: RuntimeConnection, keys: set[str]
    ) -> Faults:
        """Loads what is missing and pins all that is there; single flight for each copy."""
        if not connection.hello.result().traits.lora:
            # No fault of theirs: another runtime of the model may be on its way.
            why = f"{entry.key} runs on {entry.runtime}, which takes no adapters"
            return {key: ModelUnavailable(why, retry_after_s=1.0) for key in keys}
        async with copy.turn:
            specs, faults = await self._specs(copy, keys)
            wanted = [key for key in keys if key not in faults]
            while (moves := copy.adapters.plan(wanted, most_adapters(entry))) is None:
                copy.freed.clear()
                await copy.freed.wait()
            faults |= await self._move(copy, entry, connection, moves, specs)
            copy.adapters.pin([key for key in keys if key not in faults])
            return faults

    async def _specs(
        self, copy: _Copy, keys: Iterable[str]
    ) -> tuple[dict[str, AdapterSpec], Faults]:
        """What the runtime is told of those that are to be loaded, their files compared."""
        faults: Faults = {}
        adapters: list[Adapter] = []
        for key in (key for key in keys if key not in copy.adapters.here):
            adapter, fault = self._known(key), self._fault(key)
            if adapter is None or fault is not None:
                faults[key] = fault or _unknown(key)
            else:
                adapters.append(adapter)
        if not adapters:
            return {}, faults
        folders = await asyncio.to_thread(_folders, adapters, self._cache_dir)
        specs: dict[str, AdapterSpec] = {}
        for adapter, folder in zip(adapters, folders, strict=True):
            if isinstance(folder, ShoalError):
                faults[adapter.key] = self._on_fault(adapter.key, folder)
            else:
                specs[adapter.key] = AdapterSpec(adapter.key, str(folder))
        return specs, faults

    async def _move(
        self,
        copy: _Copy,
        entry: Entry,
        connection: RuntimeConnection,
        moves: Moves,
        specs: dict[str, AdapterSpec],
    ) -> Faults:
        await self._unload(copy, entry, connection, moves.unload)
        calls = (connection.load_adapter(entry.key, specs[key]) for key in moves.load)
        ended = await asyncio.gather(*calls, return_exceptions=True)
        faults: Faults = {}
        for key, loaded in zip(moves.load, ended, strict=True):
            if isinstance(loaded, Bug | OutOfMemory):  # whatever it is, no item is the culprit
                faults[key] = self._on_fault(key, ModelUnavailable(loaded.message))
            elif isinstance(loaded, ShoalError) and not isinstance(loaded, RuntimeCrashed):
                faults[key] = self._on_fault(key, loaded)
            elif isinstance(loaded, BaseException):
                raise loaded
            else:
                copy.adapters.add(key, loaded.memory_bytes, monotonic())
                copy.loaded.size_bytes += loaded.memory_bytes
        if moves.load:
            log.info("loaded %d adapters beside %s", len(moves.load) - len(faults), entry.key)
        return faults

    async def _unload(
        self, copy: _Copy, entry: Entry, connection: RuntimeConnection, keys: Iterable[str]
    ) -> None:
        gone = list(keys)
        for key in gone:
            copy.loaded.size_bytes -= copy.adapters.drop(key)
        await asyncio.gather(*(connection.unload_adapter(entry.key, key) for key in gone))

    # --- the catalog, and what others see

    def on_catalog(self, devices: Iterable[Device]) -> None:
        """The catalog may have changed: what was waited for comes, what is gone goes when idle."""
        self._news.set()
        by_name = {device.name: device for device in devices}
        for (name, model), copy in list(self._copies.items()):
            if by_name[name].resident.get(model) is not copy.loaded:
                del self._copies[name, model]
            elif copy.adapters.unwanted(lambda key: self._known(key) is not None):
                self._spawn(self._tidy(copy, by_name[name]), f"tidy {model}")
        for key in [key for key in (*self._faults, *self._fetched) if self._known(key) is None]:
            self._faults.pop(key, None)
            self._fetched.discard(key)

    async def _tidy(self, copy: _Copy, device: Device) -> None:
        """Unloads what the catalog no longer has."""
        entry = copy.loaded.entry
        async with copy.turn:
            process = device.processes.get(entry.process)
            if process is None or device.resident.get(entry.key) is not copy.loaded:
                return
            gone = copy.adapters.unwanted(lambda key: self._known(key) is not None)
            try:
                await self._unload(copy, entry, process.live(), gone)
            except ShoalError as error:
                log.warning("adapters of %s were not unloaded: %s", entry.key, error)

    def states(self, entry: Entry, devices: Iterable[Device]) -> list[AdapterState]:
        """The adapters that are loaded beside a model's copies."""
        now_s = monotonic()
        return [
            AdapterState(key, device.name, it.size_bytes, 0.0 if it.pins else now_s - it.used_s)
            for device in devices
            if (copy := self._copies.get((device.name, entry.key))) is not None
            and device.resident.get(entry.key) is copy.loaded
            for key, it in copy.adapters.here.items()
        ]

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)
        return task

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits for it, if anybody does, has it

    async def close(self) -> None:
        """Ends what is under way."""
        self._is_closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pool.shutdown(wait=False, cancel_futures=True)


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


def most_adapters(entry: Entry) -> int:
    """How many adapters a copy of a model has at once: its option `max_adapters`, or the usual."""
    return max(1, int(entry.options.get("max_adapters", MAX_RESIDENT_ADAPTERS)))
