"""The shell around the residency planner: it looks, asks, and has it done.

Owns the loop that reads the broker's counts, has fetched what must come first, tells the policy
what is, and hands its plan to `moves`; operators' nudges; and which models' items this worker
pulls: those that are loaded or on their way. Does not own the choice (`shoal.core.residency`), what
the policy is told (`picture`) or how a plan is carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable

from shoal.catalog.schema import Entry
from shoal.clock import monotonic
from shoal.core.residency import Close, Held, Memory, ResidencyPolicy, fits
from shoal.errors import OutOfMemory, QueueUnavailable, ShoalError
from shoal.queue.interface import Queue
from shoal.wire.envelope import Nudge, UnreadableMessage, decode_nudge
from shoal.worker.demand import Wish
from shoal.worker.fetches import Fetches
from shoal.worker.memory import HOST, GpuMemory, Memories, memory_of
from shoal.worker.moves import Moves, moves_of
from shoal.worker.picture import Picture
from shoal.worker.roster import Roster

log = logging.getLogger(__name__)

LOOK_S = 0.1
LAZY_LOOK_S = 1.0
GPU_LOOK_S = 1.0
GPU_ANSWER_S = 2.0
MEET_S = 0.2
PROCESS_IDLE_S = 10.0


class Residency:
    """Keeps the devices' models as the policy wants them.

    `on_strand` is called with a model whose items are here and that another worker can serve.
    """

    def __init__(
        self,
        queue: Queue,
        roster: Roster,
        picture: Picture,
        policy: ResidencyPolicy,
        *,
        memories: Memories,
        fetches: Fetches,
        worker: str,
    ) -> None:
        self.on_strand: Callable[[Entry], None] = lambda _: None
        self.residents = picture.residents
        self.moves = Moves(queue, roster, picture, worker)
        self._queue = queue
        self._roster = roster
        self._policy = policy
        self._memories = memories
        self._fetches = fetches
        self._picture = picture
        self._peers = picture.peers
        self._demand = picture.demand
        self._worker = worker
        self._counted_s = -math.inf
        self._asked_s = -math.inf
        self._planned_s = -math.inf
        self._news = False
        self._wake = asyncio.Event()
        self._draining = False

    def wants(self, entry: Entry) -> bool:
        """Whether this worker pulls a model's items: it is loaded here, or on its way.

        Where no worker can load it, its items are pulled to be told so.
        """
        if entry.key in self.moves.going:
            return False
        state = self.residents.state(entry)
        if state == "unavailable":
            return not self._peers.can_serve(entry.key)
        if state == "loading":  # items are left to those that are ready for them
            return not self._peers.copies().get(entry.key)
        return state == "resident"

    def can_others_serve(self, entry: Entry) -> bool:
        """Whether another worker says that it could."""
        return self._peers.can_serve(entry.key)

    def on_arrival(self, model: str) -> None:
        """An item of a model has come."""
        self._policy.on_requests(model, 1, monotonic())

    def wake(self) -> None:
        """Something has become possible."""
        self._news = True
        self._wake.set()

    def on_fetched(self, entry: Entry, error: ShoalError | None) -> None:
        """A fetch has ended."""
        if error is not None and entry.key not in self._roster.retired:
            log.error("%s cannot be fetched: %s", entry.key, error)
            self.residents.faults.on_fault(entry, error)
        self.wake()

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
            self.residents.sizes.on_given_up(entry)
            wish: Wish = "here" if nudge.worker else "somewhere"
            self._demand.wish(entry.key, wish, monotonic())
            self.wake()
            return
        self._demand.fulfil(entry.key)
        if not entry.pinned or entry.key in self._roster.retired:
            self.moves.spawn_evictions(entry, "an operator asked for it")

    def at_work(self) -> set[str]:
        """Models that something is done with or waits for, whether the catalog has them or not."""
        devices = self.residents.devices
        loading = {key for device in devices for key in device.loading}
        running = {sent.model for device in devices for sent in device.sent}
        running |= {k for device in devices for k, c in device.resident.items() if c.texts}
        return loading | running | {model for model, n in self._demand.waiting.items() if n}

    def part_with(self, entry: Entry) -> None:
        """A model is about to leave the catalog, and nothing of it is here: its copies go."""
        self._demand.fulfil(entry.key)
        self.moves.spawn_evictions(entry, "it left the catalog")

    def stop_loading(self) -> None:
        """The worker drains: what is loaded stays and runs, nothing more comes."""
        self._draining = True
        for device in self.residents.devices:
            device.closing.clear()

    # --- the loop

    async def run(self) -> None:
        """Looks whenever something has happened, and every `LOOK_S`, for ever.

        First the others have a moment to say what they hold: they answer a worker that is new.
        """
        await self.moves.on_told()
        await asyncio.sleep(MEET_S if self._peers.alone else 0.0)
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_S)
            self._wake.clear()
            await self._count()
            await self._ask_gpus()
            if not self._draining and self._queue.connected:
                self._step()
            await self.residents.end_idle_processes(PROCESS_IDLE_S)

    async def _count(self) -> None:
        """Reads the broker's counts; seldom where all models are here anyway."""
        now_s = monotonic()
        here = self._picture.here()
        all_here = all(entry.key in here for entry in self._roster.servable())
        if now_s - self._counted_s < (LAZY_LOOK_S if all_here else LOOK_S / 2):
            return
        self._counted_s = now_s
        try:
            counts = await self._queue.counts()
        except QueueUnavailable as error:
            log.debug("counts: %s", error)
            return
        self._demand.on_counts(counts, here, now_s, self._picture.growing())

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
                    async with asyncio.timeout(GPU_ANSWER_S):
                        told = await process.live().memory()
                except (ShoalError, TimeoutError):  # it does not run, or does not say
                    continue
                gpu.total_bytes, gpu.free_bytes = told.device_total_bytes, told.device_free_bytes
                gpu.held_bytes += told.device_bytes
            self._memories.on_gpu(device.name, gpu)

    def _step(self) -> None:
        """One plan, where one could say something new."""
        now_s = monotonic()
        here = self._picture.here()
        waits = self._picture.queues_beside_idle() or any(
            n and model not in here for model, n in self._demand.waiting.items()
        )
        if not (self._news or waits or now_s - self._planned_s >= LAZY_LOOK_S):
            return
        self._news, self._planned_s = False, now_s
        held = self._picture.held(now_s)
        self._fetch_first(held)
        actions = self._policy.plan(held, now_s)
        for device in self.residents.devices:
            name = device.name
            device.closing = {a.model for a in actions if isinstance(a, Close) and a.device == name}
        self.moves.begin(moves_of(actions))
        self._report_unfit(held)
        self._give_up_stranded()

    def _fetch_first(self, held: Held) -> None:
        """Fetches what is wanted and not on this machine; it is in no plan before."""
        for demand in held.demands:
            wanted = demand.waiting or demand.pinned or demand.min_copies > demand.elsewhere
            entry = self._roster.entries.get(demand.model)
            if not wanted or entry is None or self._fetches.is_here(entry):
                continue
            if self.residents.fault(entry) is None:
                self._fetches.begin(entry)

    def _give_up_stranded(self) -> None:
        """Items of a model that has gone from here, and that others have, are theirs to run."""
        there = self._peers.copies()
        for key, entry in list(self._roster.entries.items()):
            waiting = any(line.waiting for line in self._roster.lines_of(key))
            if waiting and there.get(key) and self.residents.state(entry) == "cold":
                self.on_strand(entry)

    def _report_unfit(self, held: Held) -> None:
        """A model that no budget has room for fails at once, and not at its deadline."""
        for demand in held.demands:
            entry = self._roster.entries.get(demand.model)
            if demand.waiting and not demand.blocked and entry and not fits(held, demand.model):
                size_mib = demand.size_bytes / 2**20
                most_mib = max(memory.budget_bytes for memory in held.memories) / 2**20
                what = f"it needs {size_mib:.0f} MiB, and beside what is pinned there is no room"
                error = OutOfMemory(f"{what} for it in {most_mib:.0f} MiB")
                self.residents.faults.on_fault(entry, error)
                self.residents.sizes.on_given_up(entry)
                self.moves.on_open(entry)

    def memories(self) -> tuple[Memory, ...]:
        """The memories now, as they are measured."""
        return self._picture.memories()

    async def close(self) -> None:
        """Ends what is left."""
        await self.moves.close()
        await self._fetches.close()
