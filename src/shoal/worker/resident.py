"""Which model is loaded on which device.

Owns loading (single flight for each device and model), what is resident, what cannot be loaded and
for how long that is believed, and the choice of a device for a model's next batch. Does not own
batches (`dispatch`) or processes (`supervise`). Eviction is not there yet: what is loaded stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shoal.catalog.resolve import model_spec
from shoal.catalog.schema import Entry
from shoal.clock import monotonic
from shoal.errors import (
    ModelLoading,
    ModelUnavailable,
    OutOfMemory,
    RuntimeCrashed,
    RuntimeFault,
    ShoalError,
)
from shoal.ipc.messages import Traits
from shoal.worker.supervise import RuntimeProcess

log = logging.getLogger(__name__)

State = Literal["cold", "loading", "resident", "unavailable"]

COOL_DOWN_S = 30.0
LOAD_CRASHES = 3
IN_FLIGHT_BATCHES = 2
_LEAST_LEAD_S = 0.003


def _lead_s(expected_s: float) -> float:
    """How long before a batch's expected end its successor is formed.

    Sending one takes a while, and the estimate is off by a tenth or so.
    """
    return max(_LEAST_LEAD_S, 0.1 * expected_s)


@dataclass(slots=True, eq=False)
class Sent:
    """A batch on a device. begun: it runs; else it waits there for the one before it."""

    expected_s: float
    begun: bool = False


@dataclass(slots=True)
class Device:
    """A device and what runs on it.

    resident: the runtime that holds each loaded model, by the model's id. loading: ids of models
    on their way. sent: the batches that are not answered, the one that runs first.
    stage_s: when that is about to end.
    """

    name: str
    processes: dict[str, RuntimeProcess] = field(default_factory=dict)
    resident: dict[str, str] = field(default_factory=dict)
    loading: set[str] = field(default_factory=set)
    sent: deque[Sent] = field(default_factory=lambda: deque(maxlen=IN_FLIGHT_BATCHES))
    stage_s: float = 0.0

    @property
    def in_flight(self) -> int:
        """Batches sent and not answered."""
        return len(self.sent)

    def holds(self, model: str) -> bool:
        """Whether a model is loaded here."""
        return model in self.resident

    def is_free(self, now_s: float) -> bool:
        """Whether it can take a batch: it idles, or is about to."""
        if self.in_flight == 0:
            return True
        return self.in_flight < IN_FLIGHT_BATCHES and now_s >= self.stage_s

    def on_sent(self, expected_s: float, now_s: float) -> Sent:
        """A batch has left for it."""
        sent = Sent(expected_s)
        self.sent.append(sent)
        self._begin(now_s)
        return sent

    def on_back(self, sent: Sent, now_s: float, *, lost: bool) -> None:
        """A batch has come back, or was lost with its process."""
        self.sent.remove(sent)
        if not lost:
            self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        if self.sent and not self.sent[0].begun:
            self.sent[0].begun = True
            expected_s = self.sent[0].expected_s
            self.stage_s = now_s + expected_s - _lead_s(expected_s)


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
        self._crashes: dict[str, int] = {}
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
        device.resident = {m: r for m, r in device.resident.items() if r != runtime}
        self._on_change()

    async def renew(self, device: Device, runtime: str, why: str) -> None:
        """Ends a runtime's process, so that all it held is given back; it starts when needed."""
        log.error("runtime %s on %s %s and is started anew", runtime, device.name, why)
        await self.process(device, runtime).kill()

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
        if any(entry.id in d.resident for d in self.devices):
            return "resident"
        if any(entry.id in d.loading for d in self.devices):
            return "loading"
        return "unavailable" if self.fault(entry) else "cold"

    def load_wait_s(self, entry: Entry, arrived_s: float) -> float:
        """How much of an item's wait since `arrived_s` was the model's load."""
        times = self._times.get(entry.key)
        return max(0.0, times.ended_s - max(arrived_s, times.begun_s)) if times else 0.0

    def free(self, now_s: float) -> list[Device]:
        """The devices that can take a batch now."""
        return [device for device in self.devices if device.is_free(now_s)]

    def stage_moments(self, now_s: float) -> list[float]:
        """When devices that are busy now will be about to end what they run."""
        busy = [d for d in self.devices if 0 < d.in_flight < IN_FLIGHT_BATCHES]
        return [d.stage_s for d in busy if d.stage_s > now_s]

    def want(self, entry: Entry) -> None:
        """A model has work: it is loaded, if it is nowhere yet, on the least busy device.

        Where it is somewhere already, another copy needs a device that idles.
        """
        holders = [d for d in self.devices if entry.id in d.resident]
        if any(d.in_flight == 0 for d in holders):
            return
        if any(entry.id in d.loading for d in self.devices) or self.fault(entry) is not None:
            return
        others = [d for d in self.devices if not d.loading and d not in holders]
        if holders:
            others = [d for d in others if d.in_flight == 0]
        if others:
            self.load(entry, min(others, key=lambda d: d.in_flight))

    def load(self, entry: Entry, device: Device) -> None:
        """Begins to load a model on a device, unless it is there or on its way."""
        if entry.id in device.resident or entry.id in device.loading:
            return
        device.loading.add(entry.id)
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
        except RuntimeCrashed as error:
            # The process may have been killed for reasons of its own; its backoff is the pause.
            self._crashes[entry.key] = self._crashes.get(entry.key, 0) + 1
            log.warning("%s was lost while it loaded: %s", entry.key, error)
            if self._crashes[entry.key] >= LOAD_CRASHES:
                self._on_fault(entry, error)
        except ShoalError as error:
            self._on_fault(entry, error)
        except TimeoutError:
            self._on_fault(
                entry, ModelLoading(f"{entry.key} did not load in {self._load_timeout_s:.0f} s")
            )
            await self.renew(device, entry.runtime, "does not finish a load")
        except Exception as error:  # task root
            log.exception("loading %s", entry.key)
            self._on_fault(entry, ModelUnavailable(f"{type(error).__name__}: {error}"))
        else:
            if not connection.lost:
                device.resident[entry.id] = entry.runtime
            self.memory_bytes[entry.key] = loaded.memory_bytes
            self._faults.pop(entry.key, None)
            self._crashes.pop(entry.key, None)
            self._times[entry.key] = LoadTimes(begun_s, monotonic())
            log.info(
                "loaded %s on %s in %.2f s, %.0f MiB",
                *(entry.key, device.name, monotonic() - begun_s, loaded.memory_bytes / 2**20),
            )
        finally:
            device.loading.discard(entry.id)
            self._on_change()

    def _on_fault(self, entry: Entry, error: ShoalError) -> None:
        """Believes for a while that a model does not load: its fault, and none of its items'."""
        log.error("%s does not load: %s", entry.key, error)
        if isinstance(error, (RuntimeCrashed, OutOfMemory)):
            error = ModelUnavailable(f"{entry.key} does not load: {error}")
        self._faults[entry.key] = (error, monotonic() + COOL_DOWN_S)

    async def stop(self) -> None:
        """Ends every load and every process."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(p.stop() for d in self.devices for p in d.processes.values()))
