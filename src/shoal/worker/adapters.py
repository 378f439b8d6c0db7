"""LoRA adapters on the copies of their models.

Owns loading an adapter beside a copy before what needs it runs, keeping it there while it is in
use, and letting an adapter that cannot be had fail only its own items. What is loaded goes with its
copy: a copy that was evicted, or lost with its process, has none when it comes back. Does not own
which ones stay (`shoal.core.adapters`), their files and faults (`adapter_files`) or copies
(`resident`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shoal.catalog.schema import Adapter, Entry
from shoal.clock import monotonic
from shoal.core.adapters import ResidentAdapters, parted
from shoal.errors import Bug, ModelUnavailable, OutOfMemory, RuntimeCrashed, ShoalError
from shoal.ipc.client import RuntimeConnection
from shoal.ipc.messages import AdapterSpec, ItemDone, Ran, RunItem
from shoal.wire.envelope import AdapterState, Failure
from shoal.wire.generation import Generated, Piece
from shoal.worker.adapter_files import AdapterFiles, Faults
from shoal.worker.device import Device, Loaded

log = logging.getLogger(__name__)

# Who finds its adapters loaded goes ahead of one that waits for room, but not for longer: what is
# used all the time would never make room.
ROOM_S = 5.0


@dataclass(slots=True)
class _Copy:
    """A copy and its adapters.

    line: who wants some loaded, one after the other. turn: who changes what is loaded. freed: a
    use has ended. short_since_s: since when the first in line has waited for room.
    """

    loaded: Loaded
    adapters: ResidentAdapters = field(default_factory=ResidentAdapters)
    line: asyncio.Lock = field(default_factory=asyncio.Lock)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    short_since_s: float = math.inf


class Adapters:
    """The adapters of a worker.

    known: the adapter of a key, as the catalog has it now. most: how many a copy of an entry has at
    once.
    """

    def __init__(
        self,
        known: Callable[[str], Adapter | None],
        cache_dir: Path,
        most: Callable[[Entry], int],
    ) -> None:
        self.files = AdapterFiles(known, cache_dir)
        self._most = most
        self._copies: dict[tuple[str, str], _Copy] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def takes(self, entry: Entry) -> bool:
        """Whether a copy of an entry takes adapters, as far as is known."""
        try:
            return self._most(entry) > 0
        except ModelUnavailable:
            return False

    def check(self, entry: Entry) -> None:
        """Raises `ModelUnavailable` where a copy of an entry takes no adapters."""
        if not self._most(entry):
            raise _refused(entry)

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
        most = max(1, self._most(entry))
        done: dict[str, ItemDone] = {}
        run_s, padded_tokens = 0.0, 0
        for places in parted([item.adapter for item in items], most):
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
        faults = await self._take(copy, entry, connection, keys)
        try:
            yield faults
        finally:
            self._give(copy, keys - faults.keys())

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
        """Pins what is there, once what is missing was loaded and there is room for it.

        Who is cancelled waits no more; what has begun to load comes, and nobody uses it.
        """
        most = self._most(entry)
        if not connection.hello.result().traits.lora or not most:
            return dict.fromkeys(keys, _refused(entry))
        if keys <= copy.adapters.here.keys() and monotonic() - copy.short_since_s < ROOM_S:
            copy.adapters.pin(keys)
            return {}
        async with copy.line:
            try:
                while (faults := await self._try(copy, entry, connection, keys, most)) is None:
                    copy.short_since_s = min(copy.short_since_s, monotonic())
                    await copy.freed.wait()
            finally:
                copy.short_since_s = math.inf
        return faults

    async def _try(
        self, copy: _Copy, entry: Entry, connection: RuntimeConnection, keys: set[str], most: int
    ) -> Faults | None:
        copy.freed.clear()
        making = self._spawn(
            self._make_ready(copy, entry, connection, keys, most), f"adapters of {entry.key}"
        )
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            # What has begun to load is not left half known.
            making.add_done_callback(partial(self._give_made, copy, keys))
            raise

    def _give_made(self, copy: _Copy, keys: set[str], task: asyncio.Task[Faults | None]) -> None:
        if task.cancelled() or task.exception() is not None:
            return
        faults = task.result()
        if faults is not None:
            self._give(copy, keys - faults.keys())

    async def _make_ready(
        self, copy: _Copy, entry: Entry, connection: RuntimeConnection, keys: set[str], most: int
    ) -> Faults | None:
        """Loads what is missing and pins all that is there; None where there is no room for it."""
        async with copy.turn:
            specs, faults = await self.files.specs(keys - copy.adapters.here.keys())
            wanted = keys - faults.keys()
            moves = copy.adapters.plan(wanted, most)
            if moves is None:
                return None
            await self._unload(copy, entry, connection, moves.unload)
            faults |= await self._load_all(
                copy, entry, connection, [specs[key] for key in moves.load], wanted
            )
            copy.adapters.pin(keys - faults.keys())
            return faults

    async def _load_all(
        self,
        copy: _Copy,
        entry: Entry,
        connection: RuntimeConnection,
        specs: list[AdapterSpec],
        wanted: set[str],
    ) -> Faults:
        """Loads adapters; why some do not load. Raises `RuntimeCrashed`."""
        if specs and connection.lost:
            raise RuntimeCrashed("the runtime process is not running")
        calls = (self._load(copy, entry, connection, spec, wanted) for spec in specs)
        ended = await asyncio.gather(*calls, return_exceptions=True)
        faults: Faults = {}
        for spec, error in zip(specs, ended, strict=True):
            if isinstance(error, RuntimeCrashed):
                # It takes one call after the other: this is the one that it was at.
                self.files.on_fault(spec.key, error)
                raise error
            if isinstance(error, ShoalError):
                faults[spec.key] = self.files.on_fault(spec.key, error)
            elif isinstance(error, Exception):  # its neighbours in the batch are not to blame
                log.error("adapter %s", spec.key, exc_info=error)
                faults[spec.key] = self.files.on_fault(spec.key, Bug(repr(error)))
            elif error is not None:
                raise error
        if specs:
            log.info("loaded %d adapters beside %s", len(specs) - len(faults), entry.key)
        return faults

    async def _load(
        self,
        copy: _Copy,
        entry: Entry,
        connection: RuntimeConnection,
        spec: AdapterSpec,
        wanted: set[str],
    ) -> None:
        """Loads one; where memory is short, again without the one that is idle for longest."""
        try:
            loaded = await connection.load_adapter(entry.key, spec)
        except OutOfMemory:
            idle = copy.adapters.idle(wanted)
            if not idle:
                raise
            await self._unload(copy, entry, connection, idle[:1])
            loaded = await connection.load_adapter(entry.key, spec)
        copy.adapters.add(spec.key, loaded.memory_bytes, monotonic())
        copy.loaded.size_bytes += loaded.memory_bytes

    async def _unload(
        self, copy: _Copy, entry: Entry, connection: RuntimeConnection, keys: Iterable[str]
    ) -> None:
        gone = list(keys)
        for key in gone:
            copy.loaded.size_bytes -= copy.adapters.drop(key)
        await asyncio.gather(*(connection.unload_adapter(entry.key, key) for key in gone))

    # --- the catalog, and what others see

    def on_catalog(self, devices: Iterable[Device]) -> None:
        """The catalog may have changed: what is gone from it goes when it is idle."""
        self.files.on_catalog()
        by_name = {device.name: device for device in devices}
        for (name, model), copy in list(self._copies.items()):
            if by_name[name].resident.get(model) is not copy.loaded:
                del self._copies[name, model]
            elif copy.adapters.unwanted(self.files.is_known):
                self._spawn(self._tidy(copy, by_name[name]), f"tidy {model}")

    async def _tidy(self, copy: _Copy, device: Device) -> None:
        """Unloads what the catalog no longer has."""
        entry = copy.loaded.entry
        async with copy.turn:
            process = device.processes.get(entry.process)
            if process is None or device.resident.get(entry.key) is not copy.loaded:
                return
            gone = copy.adapters.unwanted(self.files.is_known)
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
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.files.close()


def _refused(entry: Entry) -> ModelUnavailable:
    """No fault of an adapter: another runtime of the model may be on its way."""
    why = f"{entry.key} runs on {entry.runtime}, which takes no adapters for it"
    return ModelUnavailable(why, retry_after_s=1.0)
