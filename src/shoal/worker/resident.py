"""Which models are loaded on which device, and the loads and evictions that change it.

Owns loading (single flight for each device and model) and unloading what is idle. Does not own
which models should be where (`residency`), batches (`dispatch`) or processes (`supervise`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

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
from shoal.worker.adapters import Adapters
from shoal.worker.device import IN_FLIGHT_BATCHES, Device, Loaded, Loading
from shoal.worker.faults import LoadFaults
from shoal.worker.fetches import Fetches
from shoal.worker.sizes import SizeBook
from shoal.worker.supervise import RuntimeProcess

log = logging.getLogger(__name__)

State = Literal["cold", "fetching", "loading", "resident", "unavailable"]

UNLOAD_S = 150.0  # it waits for the batch that runs
HOARD_BYTES = 64 * 1024 * 1024
# A generator computes for as long as a text grows; whatever else a core has to do comes first.
GENERATOR_NICE = 10


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
        load_timeout_s: float,
        sizes: SizeBook,
        fetches: Fetches,
        adapters: Adapters,
        on_change: Callable[[], None],
    ) -> None:
        self.devices = [Device(name) for name in devices]
        self.faults = LoadFaults()
        self.sizes = sizes
        self.adapters = adapters
        self.load_seconds = 0.0
        self.loads = 0
        self.evictions = 0
        self._threads = threads
        self._load_timeout_s = load_timeout_s
        self._fetches = fetches
        self._on_change = on_change
        self._times: dict[str, LoadTimes] = {}
        self._empty_since_s: dict[tuple[str, str], float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def device(self, name: str) -> Device:
        """A device by its name."""
        return next(device for device in self.devices if device.name == name)

    def process(self, device: Device, entry: Entry) -> RuntimeProcess:
        """The device's process for a model; made here, started when it is first used."""
        process = device.processes.get(entry.process)
        if process is None:
            process = RuntimeProcess(
                entry.runtime,
                device=device.name,
                threads=self._threads,
                on_lost=lambda: self.on_lost(device, entry),
                home=lambda: self._fetches.home(entry.runtime),
                nice=GENERATOR_NICE if entry.generates else 0,
            )
            device.processes[entry.process] = process
        return process

    def on_lost(self, device: Device, entry: Entry) -> None:
        """A model's process has died: what it held is no longer resident."""
        lost = {k for k, c in device.resident.items() if c.entry.process == entry.process}
        for key in lost:
            del device.resident[key]
        self._on_change()

    async def renew(self, device: Device, entry: Entry, why: str) -> None:
        """Ends a model's process, so that all it held is given back; it starts when needed."""
        log.error("runtime %s on %s %s and is started anew", entry.process, device.name, why)
        await self.process(device, entry).kill()

    async def rest(self, device: Device, entry: Entry, why: str, rest_s: float) -> None:
        """Takes a model off a device where it only fails; `rest_s` long it is not loaded again."""
        log.error("%s on %s %s; it rests for %.0f s", entry.key, device.name, why, rest_s)
        self.faults.on_fault(entry, ModelUnavailable(f"{entry.key} {why}"), pause_s=rest_s)
        if not await self.evict(entry.key, device, why):  # another batch of it is there already
            await self.renew(device, entry, why)

    async def traits(self, entry: Entry) -> Traits:
        """What a model's runtime can do, by its own word. Raises `RuntimeFault`.

        Where it has never run, the process that is to load the model is started.
        """
        known = [p.hello for d in self.devices if (p := d.processes.get(entry.process))]
        hello = next((hello for hello in known if hello is not None), None)
        if hello is None:
            to_hold = [d for d in self.devices if entry.key in {*d.loading, *d.resident}]
            process = self.process((to_hold or self.devices)[0], entry)
            await process.connection()
            hello = process.hello
        if hello is None:
            raise RuntimeFault(f"the {entry.runtime} runtime said no hello")
        return hello.traits

    def pids(self) -> list[int]:
        """The runtime processes that run."""
        processes = [p for device in self.devices for p in device.processes.values()]
        return [pid for process in processes for pid in process.pids]

    def base_bytes(self) -> int:
        """What the processes that run held before their first model."""
        processes = [p for device in self.devices for p in device.processes.values()]
        return sum(process.base_bytes for process in processes if process.pid is not None)

    def fault(self, entry: Entry) -> ShoalError | None:
        """Why the model could not be loaded a short while ago; None when it may be tried."""
        return self.faults.current(entry.key)

    def state(self, entry: Entry) -> State:
        """What a model is here."""
        if any(entry.key in d.resident for d in self.devices):
            return "resident"
        if any(entry.key in d.loading for d in self.devices):
            return "loading"
        if entry.key in self._fetches.under_way:
            return "fetching"
        return "unavailable" if self.fault(entry) else "cold"

    def holders(self, entry: Entry) -> list[Device]:
        """The devices that have the model."""
        return [device for device in self.devices if entry.key in device.resident]

    def loads_of(self, entry: Entry) -> list[Loading]:
        """The model's loads under way, and its fetch."""
        loads = [d.loading[entry.key] for d in self.devices if entry.key in d.loading]
        fetch = self._fetches.under_way.get(entry.key)
        return [*loads, fetch] if fetch is not None else loads

    def load_wait_s(self, entry: Entry, since_s: float) -> float:
        """How much of an item's wait since `since_s` was the model's load."""
        times = self._times.get(entry.key)
        return max(0.0, times.ended_s - max(since_s, times.begun_s)) if times else 0.0

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

    def load(self, entry: Entry, device: Device) -> asyncio.Task[None]:
        """Begins to load a model on a device, where `loading` has it already."""
        return self._spawn(self._load(entry, device), f"load {entry.key}")

    def _spawn(self, work: object, name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _load(self, entry: Entry, device: Device) -> None:
        loading, begun_s = device.loading[entry.key], monotonic()
        error: ShoalError | None = None
        try:
            loading.phase = "loading"
            spec = await self._fetches.spec(entry)
            async with asyncio.timeout(self._load_timeout_s):
                process = self.process(device, entry)
                connection = await process.connection()
                loading.in_runtime, asked_s = True, monotonic()
                loaded = await connection.load(spec)
                process.on_loaded()
        except RuntimeCrashed as raised:
            log.warning("%s was lost while it loaded: %s", entry.key, raised)
            error = self.faults.on_crash(entry, raised)
        except OutOfMemory as raised:
            log.warning("%s did not fit on %s: %s", entry.key, device.name, raised)
            self.sizes.on_out_of_memory(entry)
            error = self.faults.on_out_of_memory(entry, raised)
            if error is not None:
                self.sizes.on_given_up(entry)
        except ShoalError as raised:
            error = self.faults.on_fault(entry, raised)
        except TimeoutError:
            late = ModelLoading(f"{entry.key} did not load in {self._load_timeout_s:.0f} s")
            error = self.faults.on_fault(entry, late)
            await self.renew(device, entry, "does not finish a load")
        except Exception as raised:  # task root
            log.exception("loading %s", entry.key)
            unknown = ModelUnavailable(f"{type(raised).__name__}: {raised}")
            error = self.faults.on_fault(entry, unknown)
        else:
            if not connection.lost:
                now_s = monotonic()
                device.resident[entry.key] = Loaded(
                    *(entry, loaded.memory_bytes, now_s, now_s),
                    slots=loaded.slots,
                    kv_tokens=loaded.kv_tokens,
                )
            self.sizes.on_loaded(entry, loaded.memory_bytes, monotonic() - asked_s)
            self._on_loaded(entry, device, begun_s, loaded.memory_bytes)
        finally:
            del device.loading[entry.key]
            if error is not None:
                log.error("%s does not load: %s", entry.key, error)
            self._on_change()

    def _on_loaded(self, entry: Entry, device: Device, begun_s: float, size_bytes: int) -> None:
        ended_s = monotonic()
        self.faults.on_loaded(entry.key)
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
            process = self.process(device, entry)
            if entry.generates:
                await process.rest()  # what an engine has taken goes back with it, and only so
            elif process.hello is not None:
                keep = process.hello.traits.host_tier
                async with asyncio.timeout(UNLOAD_S):
                    left = await process.live().unload(key, keep=keep)
                if left.process_bytes > process.base_bytes + HOARD_BYTES:
                    await self._end_if_empty(device, entry.process)
        except RuntimeCrashed as error:
            log.warning("%s went with its process: %s", key, error)
        except (ShoalError, TimeoutError) as error:
            log.warning("%s was not unloaded: %r", key, error)
            await self.renew(device, entry, "does not unload a model")
        self.evictions += 1
        log.info("evicted %s from %s: %s", key, device.name, why)
        self._on_change()
        return True

    async def _end_if_empty(self, device: Device, name: str) -> None:
        """Ends a process that keeps memory of its last batches and has no model any more."""
        entries = [loaded.entry for loaded in device.resident.values()]
        entries += [loading.entry for loading in device.loading.values()]
        if not any(entry.process == name for entry in entries):
            await device.processes[name].rest()

    async def end_idle_processes(self, idle_s: float) -> None:
        """Ends the processes that have held no model for so long: they hold memory, too."""
        now_s = monotonic()
        for device in self.devices:
            at_work = {loaded.entry.process for loaded in device.resident.values()}
            at_work |= {loading.entry.process for loading in device.loading.values()}
            for name, process in list(device.processes.items()):
                if name in at_work or process.pid is None:
                    self._empty_since_s.pop((device.name, name), None)
                elif now_s - self._empty_since_s.setdefault((device.name, name), now_s) > idle_s:
                    log.info("runtime %s on %s holds no model and ends", name, device.name)
                    await self._end_if_empty(device, name)

    async def stop(self) -> None:
        """Ends every load and every process."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.adapters.close()
        await asyncio.gather(*(p.stop() for d in self.devices for p in d.processes.values()))
