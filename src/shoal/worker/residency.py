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

from shoal.catalog.schema import Entry
from shoal.clock import monotonic
from shoal.core.residency import (
    Action,
    Close,
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
from shoal.worker.demand import Wish
from shoal.worker.memory import HOST, GpuMemory, Memories, memory_of
from shoal.worker.peers import LEASE_S, Lease, Leases
from shoal.worker.picture import Picture
from shoal.worker.roster import Roster

log = logging.getLogger(__name__)

LOOK_S = 0.1
GPU_LOOK_S = 1.0
COUNT_ALL_RESIDENT_S = 1.0
LOADS_AT_ONCE = 8  # of one model, in a pool
PROCESS_IDLE_S = 10.0
_NO_LEASE_S = 1.0


class Residency:
    """Keeps the devices' models as the policy wants them.

    `on_open` is called with an entry whose items may be pulled from now on, `on_told` when other
    workers should hear what has changed.
    """

    def __init__(
        self,
        queue: Queue,
        roster: Roster,
        picture: Picture,
        policy: ResidencyPolicy,
        *,
        memories: Memories,
        worker: str,
    ) -> None:
        self.on_open: Callable[[Entry], None] = lambda _: None
        self.on_told: Callable[[], Awaitable[None]] = _nobody
        self.residents = picture.residents
        self._queue = queue
        self._roster = roster
        self._policy = policy
        self._memories = memories
        self._picture = picture
        self._peers = picture.peers
        self._demand = picture.demand
        self._worker = worker
        self._leases = Leases(queue.leases, worker)
        self._counted_s = -math.inf
        self._asked_s = -math.inf
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False

    def wants(self, entry: Entry) -> bool:
        """Whether this worker pulls a model's items: it is loaded here, or on its way.

        Where it cannot be loaded and there is no other worker, its items are pulled to be told so.
        """
        state = self.residents.state(entry)
        return state in ("resident", "loading") or (state == "unavailable" and self._peers.alone)

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
            wish: Wish = "here" if nudge.worker else "somewhere"
            self._demand.wish(entry.key, wish, monotonic())
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
        held = self._picture.held(now_s)
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
                self._picture.refuse(action.model, _NO_LEASE_S)
                return
        log.info("loading %s on %s: %s", action.model, action.device, action.why)
        task = self.residents.load(entry, self.residents.device(action.device))
        if task is None:
            return
        self.on_open(entry)
        self._spawn(self._see_through(entry, task, lease), "see a load through")

    def _slots(self, entry: Entry) -> int:
        """How many workers may load a model at once: as many as its backlog gives work to."""
        needed = math.ceil(
            self._picture.backlog_s(entry) / max(0.1, self.residents.sizes.load_s(entry))
        )
        there = self._peers.copies().get(entry.key, 0)
        return min(LOADS_AT_ONCE, max(1, needed - there))

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
        return self._picture.memories()

    async def close(self) -> None:
        """Ends what is left."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _nobody() -> None:
    return
