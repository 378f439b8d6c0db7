"""Which model is loaded on which device.

Owns loading (single flight for each device and model), what is resident, what cannot be loaded and
for how long that is believed, and the choice of a device for a model's next batch. Does not own
batches (`dispatch`) or processes (`supervise`). Eviction is not there yet: what is loaded stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shoal.catalog.resolve import model_spec
from shoal.catalog.schema import Entry
from shoal.clock import monotonic
from shoal.errors import ModelLoading, RuntimeFault, ShoalError
from shoal.ipc.messages import Traits
from shoal.worker.supervise import RuntimeProcess

log = logging.getLogger(__name__)

State = Literal["cold", "loading", "resident", "unavailable"]

COOL_DOWN_S = 30.0
IN_FLIGHT_BATCHES = 2


@dataclass(slots=True)
class Device:
    """A device and what runs on it.

    resident: the runtime that holds each loaded model, by the model's key. loading: keys of models
    on their way. in_flight: batches sent and not answered.
    """

    name: str
    processes: dict[str, RuntimeProcess] = field(default_factory=dict)
    resident: dict[str, str] = field(default_factory=dict)
    loading: set[str] = field(default_factory=set)
    in_flight: int = 0


@dataclass(slots=True)
class LoadTimes:
    """When a model's last load began and ended, in monotonic seconds."""

    begun_s: float
    ended_s: float


class Residents:
    """Models on devices. `on_change` is called when something has become possible or impossible."""

    def __init__(
        self,
        devices: Sequence[str],
        *,
        threads: int,
        cache_dir: Path,
        load_timeout_s: float,
        on_change: Callable[[], None],
    ) -> None:
        self.devices = [Device(name) for name in devices]
        self.memory_bytes: dict[str, int] = {}
        self._threads = threads
        self._cache_dir = cache_dir
        self._load_timeout_s = load_timeout_s
        self._on_change = on_change
        self._faults: dict[str, tuple[ShoalError, float]] = {}
        self._times: dict[str, LoadTimes] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def process(self, device: Device, runtime: str) -> RuntimeProcess:
        """The device's process of a runtime; made here, started when it is first used."""
        process = device.processes.get(runtime)
        if process is None:
            process = RuntimeProcess(
                runtime,
                device=device.name,
                threads=self._threads,
                on_lost=lambda: self.on_lost(device, runtime),
            )
            device.processes[runtime] = process
        return process

    def on_lost(self, device: Device, runtime: str) -> None:
        """A runtime's process has died: what it held is no longer resident."""
        device.resident = {k: r for k, r in device.resident.items() if r != runtime}
        self._on_change()

    async def traits(self, runtime: str) -> Traits:
        """What a runtime can do, by its own word. Raises `RuntimeFault`."""
        process = self.process(self.devices[0], runtime)
        if process.hello is None:
            await process.connection()
        if process.hello is None:
            raise RuntimeFault(f"the {runtime} runtime said no hello")
        return process.hello.traits

    def fault(self, entry: Entry) -> ShoalError | None:
        """Why the model could not be loaded a short while ago; None when it may be tried."""
        error, until_s = self._faults.get(entry.key, (None, 0.0))
        return error if monotonic() < until_s else None

    def state(self, entry: Entry) -> State:
        """cold, loading, resident or unavailable."""
        if any(entry.key in d.resident for d in self.devices):
            return "resident"
        if any(entry.key in d.loading for d in self.devices):
            return "loading"
        return "unavailable" if self.fault(entry) else "cold"

    def load_wait_s(self, entry: Entry, arrived_s: float) -> float:
        """How much of an item's wait since `arrived_s` was the model's load."""
        times = self._times.get(entry.key)
        return max(0.0, times.ended_s - max(arrived_s, times.begun_s)) if times else 0.0

    def device_for(self, entry: Entry, *, full_batch: bool) -> Device | None:
        """A device for the model's next batch, or None: then `on_change` will tell.

        An idle device that holds the model first; a busy one may take one more batch ahead when
        that is full already. Where none can, the model is loaded on an idle device.
        """
        holders = [d for d in self.devices if entry.key in d.resident]
        room = IN_FLIGHT_BATCHES if full_batch else 1
        free = [d for d in holders if d.in_flight < room]
        if free:
            return min(free, key=lambda d: d.in_flight)
        idle = [d for d in self.devices if not (d.in_flight or d.loading or d in holders)]
        somewhere = any(entry.key in d.loading for d in self.devices)
        if idle and not somewhere and self.fault(entry) is None:
            self.load(entry, idle[0])
        return None

    def load(self, entry: Entry, device: Device) -> None:
        """Begins to load a model on a device, unless it is there or on its way."""
        if entry.key in device.resident or entry.key in device.loading:
            return
        device.loading.add(entry.key)
        task = asyncio.create_task(self._load(entry, device), name=f"load {entry.key}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, entry: Entry, device: Device) -> None:
        begun_s = monotonic()
        try:
            async with asyncio.timeout(self._load_timeout_s):
                spec = await asyncio.to_thread(model_spec, entry, self._cache_dir)
                connection = await self.process(device, entry.runtime).connection()
                loaded = await connection.load(spec)
        except ShoalError as error:
            self._on_fault(entry, error)
        except TimeoutError:
            self._on_fault(
                entry, ModelLoading(f"{entry.key} did not load in {self._load_timeout_s:.0f} s")
            )
        else:
            device.resident[entry.key] = entry.runtime
            self.memory_bytes[entry.key] = loaded.memory_bytes
            self._faults.pop(entry.key, None)
            self._times[entry.key] = LoadTimes(begun_s, monotonic())
            log.info(
                "loaded %s on %s in %.2f s, %.0f MiB",
                *(entry.key, device.name, monotonic() - begun_s, loaded.memory_bytes / 2**20),
            )
        finally:
            device.loading.discard(entry.key)
            self._on_change()

    def _on_fault(self, entry: Entry, error: ShoalError) -> None:
        log.error("%s does not load: %s", entry.key, error)
        self._faults[entry.key] = (error, monotonic() + COOL_DOWN_S)

    async def stop(self) -> None:
        """Ends every load and every process."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(p.stop() for d in self.devices for p in d.processes.values()))
