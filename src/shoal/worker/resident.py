"""Which models are loaded on which device, and the loads and evictions that change it.

Owns loading (single flight for each device and model), unloading what is idle, and what each
device holds and runs. Does not own which models should be where (`residency`), batches
(`dispatch`) or processes (`supervise`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shoal.bundles.build import OnStep
from shoal.bundles.shelf import Home, Shelf
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
from shoal.ipc.messages import ModelSpec, Traits
from shoal.worker.faults import LoadFaults
from shoal.worker.sizes import SizeBook
from shoal.worker.supervise import RuntimeProcess

log = logging.getLogger(__name__)

State = Literal["cold", "loading", "resident", "unavailable"]

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
    model: str = ""
    begun: bool = False


@dataclass(slots=True)
class Loaded:
    """A model on a device. since_s, used_s: of its load and of its last batch."""

    entry: Entry
    size_bytes: int
    since_s: float
    used_s: float


@dataclass(slots=True)
class Loading:
    """A load under way. phase: for people."""

    entry: Entry
    begun_s: float
    phase: str = "loading"

    def on_building(self, step: str) -> None:
        """The runtime's bundle is being built."""
        self.phase = f"building the bundle: {step}"


@dataclass(slots=True)
class Device:
    """A device and what runs on it; models go by their keys.

    closing: models that get no more batches here, for they are about to be evicted. sent: the
    batches that are not answered, the one that runs first. stage_s: when that is about to end.
    """

    name: str
    processes: dict[str, RuntimeProcess] = field(default_factory=dict)
    resident: dict[str, Loaded] = field(default_factory=dict)
    loading: dict[str, Loading] = field(default_factory=dict)
    closing: set[str] = field(default_factory=set)
    sent: deque[Sent] = field(default_factory=lambda: deque(maxlen=IN_FLIGHT_BATCHES))
    stage_s: float = 0.0

    @property
    def in_flight(self) -> int:
        """Batches sent and not answered."""
        return len(self.sent)

    def holds(self, model: str) -> bool:
        """Whether a model is loaded here, and may get batches."""
        return model in self.resident and model not in self.closing

    def is_busy(self, model: str) -> bool:
        """Whether a batch of a model runs here or waits here."""
        return any(sent.model == model for sent in self.sent)

    def is_free(self, now_s: float) -> bool:
        """Whether it can take a batch: it idles, or is about to."""
        if self.in_flight == 0:
            return True
        return self.in_flight < IN_FLIGHT_BATCHES and now_s >= self.stage_s

    def on_sent(self, expected_s: float, now_s: float, model: str = "") -> Sent:
        """A batch has left for it."""
        sent = Sent(expected_s, model)
        self.sent.append(sent)
        self._begin(now_s)
        return sent

    def on_back(self, sent: Sent, now_s: float, *, lost: bool) -> None:
        """A batch has come back, or was lost with its process."""
        self.sent.remove(sent)
        if sent.model in self.resident:
            self.resident[sent.model].used_s = now_s
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
        sizes: SizeBook,
        shelf: Shelf,
        on_change: Callable[[], None],
    ) -> None:
        self.devices = [Device(name) for name in devices]
        self.faults = LoadFaults()
        self.sizes = sizes
        self.load_seconds = 0.0
        self.loads = 0
        self.evictions = 0
        self._threads = threads
        self._cache_dir = cache_dir
        self._load_timeout_s = load_timeout_s
        self._shelf = shelf
        self._on_change = on_change
        self._times: dict[str, LoadTimes] = {}
        self._empty_since_s: dict[tuple[str, str], float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def device(self, name: str) -> Device:
        """A device by its name."""
        return next(device for device in self.devices if device.name == name)

    def process(self, device: Device, runtime: str) -> RuntimeProcess:
        """The device's process of a runtime; made here, started when it is first used."""
        process = device.processes.get(runtime)
        if process is None:
            process = RuntimeProcess(
                runtime,
                device=device.name,
                threads=self._threads,
                on_lost=lambda: self.on_lost(device, runtime),
                home=lambda: self._home(runtime, lambda _: None),
            )
            device.processes[runtime] = process
        return process

    async def _home(self, runtime: str, on_step: OnStep) -> Home | None:
        """Where a runtime starts; a bundle that is not built yet is, which may take long."""
        bundle = self._shelf.of(runtime)
        return await self._shelf.home(bundle, on_step) if bundle is not None else None

    def on_lost(self, device: Device, runtime: str) -> None:
        """A runtime's process has died: what it held is no longer resident."""
        lost = {k for k, loaded in device.resident.items() if loaded.entry.runtime == runtime}
        for key in lost:
            del device.resident[key]
        self._on_change()

    async def renew(self, device: Device, runtime: str, why: str) -> None:
        """Ends a runtime's process, so that all it held is given back; it starts when needed."""
        log.error("runtime %s on %s %s and is started anew", runtime, device.name, why)
        await self.process(device, runtime).kill()

    async def traits(self, entry: Entry) -> Traits:
        """What a model's runtime can do, by its own word. Raises `RuntimeFault`.

        Where it has never run, the process that is to load the model is started.
        """
        runtime = entry.runtime
        known = [d.processes[runtime].hello for d in self.devices if runtime in d.processes]
        hello = next((hello for hello in known if hello is not None), None)
        if hello is None:
            to_hold = [d for d in self.devices if entry.key in {*d.loading, *d.resident}]
            process = self.process((to_hold or self.devices)[0], runtime)
            await process.connection()
            hello = process.hello
        if hello is None:
            raise RuntimeFault(f"the {runtime} runtime said no hello")
        return hello.traits

    def pids(self) -> list[int]:
        """The runtime processes that run."""
        processes = [p for device in self.devices for p in device.processes.values()]
        return [process.pid for process in processes if process.pid is not None]

    def fault(self, entry: Entry) -> ShoalError | None:
        """Why the model could not be loaded a short while ago; None when it may be tried."""
        return self.faults.current(entry.key)

    def state(self, entry: Entry) -> State:
        """cold, loading, resident or unavailable."""
        if any(entry.key in d.resident for d in self.devices):
            return "resident"
        if any(entry.key in d.loading for d in self.devices):
            return "loading"
        return "unavailable" if self.fault(entry) else "cold"

    def holders(self, entry: Entry) -> list[Device]:
        """The devices that have the model."""
        return [device for device in self.devices if entry.key in device.resident]

    def loads_of(self, entry: Entry) -> list[Loading]:
        """The model's loads under way."""
        return [device.loading[entry.key] for device in self.devices if entry.key in device.loading]

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

    def on_entry(self, entry: Entry) -> None:
        """The entry of a model has changed in a way that its copies live with."""
        for device in self.holders(entry):
            device.resident[entry.key].entry = entry

    def load(self, entry: Entry, device: Device) -> asyncio.Task[None] | None:
        """Begins to load a model on a device; None where it is there or on its way."""
        if entry.key in device.resident or entry.key in device.loading:
            return None
        device.loading[entry.key] = Loading(entry, monotonic())
        return self._spawn(self._load(entry, device), f"load {entry.key}")

    def _spawn(self, work: object, name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _load(self, entry: Entry, device: Device) -> None:
        loading = device.loading[entry.key]
        error: ShoalError | None = None
        try:
            spec = await self._fetch(entry, loading)
            await self._home(entry.runtime, loading.on_building)
            loading.phase = "loading"
            async with asyncio.timeout(self._load_timeout_s):
                connection = await self.process(device, entry.runtime).connection()
                loaded = await connection.load(spec)
        except RuntimeCrashed as raised:
            log.warning("%s was lost while it loaded: %s", entry.key, raised)
            error = self.faults.on_crash(entry, raised)
        except OutOfMemory as raised:
            log.warning("%s did not fit on %s: %s", entry.key, device.name, raised)
            self.sizes.on_out_of_memory(entry)
            error = self.faults.on_out_of_memory(entry, raised)
        except ShoalError as raised:
            error = self.faults.on_fault(entry, raised)
        except TimeoutError:
            late = ModelLoading(f"{entry.key} did not load in {self._load_timeout_s:.0f} s")
            error = self.faults.on_fault(entry, late)
            await self.renew(device, entry.runtime, "does not finish a load")
        except Exception as raised:  # task root
            log.exception("loading %s", entry.key)
            unknown = ModelUnavailable(f"{type(raised).__name__}: {raised}")
            error = self.faults.on_fault(entry, unknown)
        else:
            if not connection.lost:
                now_s = monotonic()
                device.resident[entry.key] = Loaded(entry, loaded.memory_bytes, now_s, now_s)
            self._on_loaded(entry, device, loading.begun_s, loaded.memory_bytes)
        finally:
            del device.loading[entry.key]
            if error is not None:
                log.error("%s does not load: %s", entry.key, error)
            self._on_change()

    async def _fetch(self, entry: Entry, loading: Loading) -> ModelSpec:
        """What the runtime is told, once the weights are here; a large fetch may take long."""
        given_up = threading.Event()

        def on_progress(done_bytes: int, total_bytes: int) -> None:  # in the thread that fetches
            if given_up.is_set():
                raise ModelLoading("the load was given up")
            share = f" {100 * done_bytes // total_bytes} %" if total_bytes else ""
            loading.phase = f"fetching{share}"

        try:
            return await asyncio.to_thread(model_spec, entry, self._cache_dir, on_progress)
        finally:
            given_up.set()
            loading.phase = "loading"

    def _on_loaded(self, entry: Entry, device: Device, begun_s: float, size_bytes: int) -> None:
        ended_s = monotonic()
        self.faults.on_loaded(entry.key)
        self.sizes.on_loaded(entry, size_bytes, ended_s - begun_s)
        self._times[entry.key] = LoadTimes(begun_s, ended_s)
        self.load_seconds += ended_s - begun_s
        self.loads += 1
        log.info(
            "loaded %s on %s in %.2f s, %.0f MiB",
            *(entry.key, device.name, ended_s - begun_s, size_bytes / 2**20),
        )

    async def evict(self, key: str, device: Device, why: str) -> bool:
        """Unloads an idle model; False where it is not there or a batch of it is on the device."""
        loaded = device.resident.get(key)
        if loaded is None or device.is_busy(key):
            return False
        # From here on nobody sends it a batch, and a load of it waits for its process's answer.
        del device.resident[key]
        device.closing.discard(key)
        entry = loaded.entry
        try:
            process = self.process(device, entry.runtime)
            if process.hello is not None:
                keep = process.hello.traits.host_tier
                await process.live().unload(key, keep=keep)
        except RuntimeCrashed as error:
            log.warning("%s went with its process: %s", key, error)
        except ShoalError as error:
            log.warning("%s was not unloaded: %s", key, error)
            await self.renew(device, entry.runtime, "does not unload a model")
        self.evictions += 1
        log.info("evicted %s from %s: %s", key, device.name, why)
        self._on_change()
        return True

    async def end_idle_processes(self, idle_s: float) -> None:
        """Ends the processes that have held no model for so long: they hold memory, too."""
        now_s = monotonic()
        for device in self.devices:
            at_work = {loaded.entry.runtime for loaded in device.resident.values()}
            at_work |= {loading.entry.runtime for loading in device.loading.values()}
            for runtime, process in device.processes.items():
                if runtime in at_work or process.pid is None:
                    self._empty_since_s.pop((device.name, runtime), None)
                elif now_s - self._empty_since_s.setdefault((device.name, runtime), now_s) > idle_s:
                    log.info("runtime %s on %s holds no model and ends", runtime, device.name)
                    await process.rest()

    async def stop(self) -> None:
        """Ends every load and every process."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(p.stop() for d in self.devices for p in d.processes.values()))
