"""The shell around the residency planner: it looks, asks, and does.

Owns the loop that reads the broker's counts, tells the policy what is, and performs what it
returns: evictions one after another on a device, then loads, each under a lease where other
workers could load the model too. Owns which models' items this worker pulls: those that are loaded
or on their way. Does not own the choice (`shoal.core.residency`) or how a model is loaded
(`resident`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from shoal.catalog.schema import Entry
from shoal.clock import monotonic
from shoal.core.residency import (
    Action,
    Close,
    Copy,
    Demand,
    Evict,
    Held,
    Load,
    Memory,
    ResidencyPolicy,
    fits,
)
from shoal.errors import OutOfMemory, QueueUnavailable, ShoalError
from shoal.queue.interface import Queue
from shoal.wire.envelope import Nudge, UnreadableMessage, decode_nudge
from shoal.worker.costs import CostBook
from shoal.worker.demand import DemandBook
from shoal.worker.memory import HOST, GpuMemory, Memories, memory_of
from shoal.worker.peers import LEASE_S, Lease, Leases, Peers
from shoal.worker.resident import Residents
from shoal.worker.roster import Roster

log = logging.getLogger(__name__)

LOOK_S = 0.1
GPU_LOOK_S = 1.0
COUNT_ALL_RESIDENT_S = 1.0
MAX_LOADS_AT_ONCE = 8  # of one model, in a pool
RETIRED_IDLE_S = 5.0
PROCESS_IDLE_S = 10.0
_NO_LEASE_S = 1.0


@dataclass(frozen=True, slots=True)
class _Size:
    size_bytes: int
    load_s: float
    measured: bool


class Residency:
    """Keeps the devices' models as the policy wants them.

    `on_open` is called with an entry whose items may be pulled from now on, `on_told` when other
    workers should hear what has changed.
    """

    def __init__(
        self,
        queue: Queue,
        roster: Roster,
        residents: Residents,
        policy: ResidencyPolicy,
        *,
        memories: Memories,
        peers: Peers,
        costs: CostBook,
        worker: str,
    ) -> None:
        self.on_open: Callable[[Entry], None] = lambda _: None
        self.on_told: Callable[[], Awaitable[None]] = _nobody
        self.residents = residents
        self._queue = queue
        self._roster = roster
        self._policy = policy
        self._memories = memories
        self._peers = peers
        self._costs = costs
        self._worker = worker
        self._leases = Leases(queue.leases, worker)
        self._demand = DemandBook()
        self._counted_s = -math.inf
        self._asked_s = -math.inf
        self._refused: dict[str, float] = {}
        self._beside_bytes: dict[str, int] = {}
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False

    def wants(self, entry: Entry) -> bool:
        """Whether this worker pulls a model's items: it is loaded here, or on its way."""
        return self.residents.state(entry) in ("resident", "loading")

    def on_arrival(self, model: str) -> None:
        """An item of a model has come."""
        self._policy.on_requests(model, 1, monotonic())

    def wake(self) -> None:
        """Something has become possible."""
        self._wake.set()

    def on_nudge(self, data: bytes) -> None:
        """An operator wants a model loaded, or gone."""
        try:
            nudge: Nudge = decode_nudge(data)
        except UnreadableMessage as error:
            log.debug("nudge: %s", error)
            return
        entry = self._roster.entries.get(nudge.model)
        if entry is None or nudge.worker not in ("", self._worker):
            return
        if nudge.verb == "load":
            self.residents.faults.forgive(entry.key)
            self._demand.wish(entry.key, monotonic())
            self.wake()
        else:
            self._demand.fulfil(entry.key)
            self._spawn(self._evict_all(entry, "an operator asked for it"), "evict")

    async def _evict_all(self, entry: Entry, why: str) -> None:
        for device in self.residents.holders(entry):
            if not entry.pinned or entry.key in self._roster.retired:
                await self._evict(Evict(entry.key, device.name, why))
        await self.on_told()

    async def part_with(self, entry: Entry) -> None:
        """A model has left the catalog, and nothing of it is here: its copies go."""
        self._demand.fulfil(entry.key)
        for device in self.residents.holders(entry):
            await self._evict(Evict(entry.key, device.name, "it left the catalog"))

    def stop_loading(self) -> None:
        """The worker drains: what is loaded stays, nothing more comes."""
        self._draining = True

    # --- the loop

    async def run(self) -> None:
        """Looks whenever something has happened, and every `LOOK_S`, for ever."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_S)
            self._wake.clear()
            await self._count()
            await self._ask_gpus()
            if not self._draining:
                await self._step()

    async def _count(self) -> None:
        """Reads the broker's counts; seldom where all models are here anyway."""
        now_s = monotonic()
        servable = self._roster.servable()
        here = {key for device in self.residents.devices for key in device.resident}
        every_s = COUNT_ALL_RESIDENT_S if all(e.key in here for e in servable) else LOOK_S / 2
        if now_s - self._counted_s < every_s:
            return
        self._counted_s = now_s
        try:
            counts = await self._queue.counts()
        except QueueUnavailable as error:
            log.debug("counts: %s", error)
            return
        self._demand.on_counts(counts, here, now_s)

    async def _ask_gpus(self) -> None:
        """What the processes on each GPU hold of its memory; the host's is read without them."""
        now_s = monotonic()
        if now_s - self._asked_s < GPU_LOOK_S:
            return
        self._asked_s = now_s
        for device in self.residents.devices:
            if memory_of(device.name) == HOST:
                continue
            gpu = GpuMemory()
            for process in device.processes.values():
                try:
                    told = await process.live().memory()
                except ShoalError:  # it does not run, and holds nothing
                    continue
                gpu.total_bytes, gpu.free_bytes = told.device_total_bytes, told.device_free_bytes
                gpu.held_bytes += told.device_bytes
            self._memories.on_gpu(device.name, gpu)

    async def _step(self) -> None:
        now_s = monotonic()
        held = self._held(now_s)
        actions = self._policy.plan(held, now_s)
        for device in self.residents.devices:
            device.closing = {
                a.model for a in actions if isinstance(a, Close) and a.device == device.name
            }
        if actions:
            by_device: dict[str, list[Action]] = {}
            for action in actions:
                by_device.setdefault(action.device, []).append(action)
            await asyncio.gather(*(self._act(group) for group in by_device.values()))
        self._report_unfit(held)
        await self.residents.end_idle_processes(PROCESS_IDLE_S)

    async def _act(self, actions: Iterable[Action]) -> None:
        """What is to be done on one device, in order; nothing is loaded where an eviction fails."""
        for action in actions:
            if isinstance(action, Evict):
                if not await self._evict(action):
                    return
            elif isinstance(action, Load):
                await self._load(action)

    async def _evict(self, action: Evict) -> bool:
        entry = self._roster.entries.get(action.model)
        device = self.residents.device(action.device)
        last = entry is not None and len(self.residents.holders(entry)) == 1
        if last and entry is not None and not device.is_busy(action.model):
            for line in self._roster.lines_of(action.model):
                await self._queue.withdraw(action.model, line.lane)
        return await self.residents.evict(action.model, device, action.why)

    async def _load(self, action: Load) -> None:
        entry = self._roster.entries.get(action.model)
        if entry is None:
            return
        lease: Lease | None = None
        if not self._peers.alone:
            try:
                lease = await self._leases.claim(action.model, self._slots(entry))
            except QueueUnavailable as error:
                log.debug("lease: %s", error)
            if lease is None:
                self._refused[action.model] = monotonic() + _NO_LEASE_S
                return
        log.info("loading %s on %s: %s", action.model, action.device, action.why)
        task = self.residents.load(entry, self.residents.device(action.device))
        if task is None:
            return
        self.on_open(entry)
        self._spawn(self._see_through(entry, task, lease), "see a load through")

    def _slots(self, entry: Entry) -> int:
        """How many workers may load a model at once: as many as its backlog gives work to."""
        needed = math.ceil(self._backlog_s(entry) / max(0.1, self.residents.sizes.load_s(entry)))
        there = self._peers.copies().get(entry.key, 0)
        return min(MAX_LOADS_AT_ONCE, max(1, needed - there))

    async def _see_through(
        self, entry: Entry, task: asyncio.Task[None], lease: Lease | None
    ) -> None:
        """Holds the lease until the load has ended and the others have heard of it."""
        await self.on_told()
        while not task.done():
            await asyncio.wait([task], timeout=LEASE_S / 3)
            if lease is not None and not task.done():
                await self._leases.renew(lease)
        self._demand.fulfil(entry.key)
        await self.on_told()
        if lease is not None:
            await self._leases.release(lease)

    # --- what the policy is told

    def _held(self, now_s: float) -> Held:
        devices = self.residents.devices
        copies = [
            Copy(
                key,
                device.name,
                loaded.size_bytes,
                loaded.since_s,
                loaded.used_s,
                busy=device.is_busy(key),
            )
            for device in devices
            for key, loaded in device.resident.items()
        ]
        elsewhere = self._peers.copies()
        memories = [self._for_models(memory, copies) for memory in self.memories()]
        most_bytes = max((memory.budget_bytes for memory in memories), default=0)
        return Held(
            memories=tuple(memories),
            copies=tuple(copies),
            demands=tuple(
                self._demand_of(entry, elsewhere, most_bytes, now_s)
                for entry in self._roster.servable()
            ),
            loading=tuple((key, device.name) for device in devices for key in device.loading),
            idle_devices=frozenset(d.name for d in devices if not d.in_flight),
        )

    def _for_models(self, memory: Memory, copies: Iterable[Copy]) -> Memory:
        """A memory without what the processes take beside their models: no eviction frees that.

        What they take is known while nothing is being loaded; a load under way counts with the
        size that it is expected to have.
        """
        models_bytes = sum(copy.size_bytes for copy in copies if copy.device in memory.devices)
        loads = [
            loading.entry
            for device in self.residents.devices
            if device.name in memory.devices
            for loading in device.loading.values()
        ]
        if not loads:
            self._beside_bytes[memory.name] = max(0, memory.used_bytes - models_bytes)
        beside_bytes = self._beside_bytes.get(memory.name, 0)
        return replace(
            memory,
            budget_bytes=max(0, memory.budget_bytes - beside_bytes),
            used_bytes=models_bytes + sum(self.residents.sizes.size_bytes(e) for e in loads),
        )

    def _demand_of(
        self, entry: Entry, elsewhere: dict[str, int], most_bytes: int, now_s: float
    ) -> Demand:
        key = entry.key
        size = self._size(entry, most_bytes)
        retired = key in self._roster.retired
        wished = self._demand.wished(key, now_s)
        pinned = entry.pinned and not retired
        least = 0 if retired else max(entry.min_replicas, int(pinned))
        there = elsewhere.get(key, 0)
        return Demand(
            model=key,
            size_bytes=size.size_bytes,
            load_s=size.load_s,
            measured=size.measured,
            waiting=self._waiting(key),
            waited_s=self._demand.waited_s(key),
            backlog_s=self._backlog_s(entry),
            pinned=pinned,
            min_copies=there + 1 if wished else least,
            elsewhere=there,
            idle_timeout_s=RETIRED_IDLE_S if retired else entry.idle_timeout_s,
            blocked=self.residents.fault(entry) is not None or self._refused_lately(key, now_s),
        )

    def _size(self, entry: Entry, most_bytes: int) -> _Size:
        """What a copy takes: as measured here, else by another worker, else as the entry says."""
        sizes, key = self.residents.sizes, entry.key
        if sizes.is_corrected(entry):  # a guess of ours must not rule a model out
            return _Size(min(sizes.size_bytes(entry), most_bytes), sizes.load_s(entry), True)
        peer = self._peers.known(key)
        if sizes.measured(entry) is None and peer is not None and peer.memory_bytes:
            return _Size(peer.memory_bytes, peer.load_s, True)
        measured = sizes.measured(entry) is not None
        return _Size(sizes.size_bytes(entry), sizes.load_s(entry), measured)

    def _waiting(self, key: str) -> int:
        """Items that wait or run, here or at the broker."""
        here = sum(line.waiting + line.preparing for line in self._roster.lines_of(key))
        return max(here, self._demand.waiting.get(key, 0))

    def _backlog_s(self, entry: Entry) -> float:
        """Device seconds of what waits, by what its items took so far, here or elsewhere."""
        waiting = self._waiting(entry.key)
        if not waiting:
            return 0.0
        item_s = self._costs.rates(entry).item_s
        if not item_s:
            peer = self._peers.known(entry.key)
            item_s = peer.item_s if peer else 0.0
        return waiting * item_s

    def _refused_lately(self, key: str, now_s: float) -> bool:
        until_s = self._refused.get(key)
        if until_s is not None and until_s <= now_s:
            del self._refused[key]
        return until_s is not None and until_s > now_s

    # --- what no plan can do

    def _report_unfit(self, held: Held) -> None:
        """A model that no budget has room for fails at once, and not at its deadline."""
        for demand in held.demands:
            entry = self._roster.entries.get(demand.model)
            if demand.waiting and not demand.blocked and entry and not fits(held, demand.model):
                size_mib = demand.size_bytes / 2**20
                most_mib = max(m.budget_bytes for m in held.memories) / 2**20
                self.residents.faults.on_fault(
                    entry,
                    OutOfMemory(
                        f"it needs {size_mib:.0f} MiB and models may have {most_mib:.0f} MiB here"
                    ),
                )
                self.on_open(entry)

    def _spawn(self, work: object, name: str) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def memories(self) -> tuple[Memory, ...]:
        """The memories now, as they are measured."""
        return self._memories.state(self.residents.pids())

    async def close(self) -> None:
        """Ends what is left."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _nobody() -> None:
    return
