"""Carrying out a residency plan: evictions, and the loads that they make room for.

Owns the order (a lease, then the evictions, then the load), the leases, and which models are about
to go: nothing more of them is pulled. A move runs beside the others and holds nobody up. Does not
own the plan (`residency`) or how a model is loaded or unloaded (`resident`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from shoal.catalog.schema import Entry
from shoal.clock import monotonic
from shoal.core.residency import Action, Evict, Load
from shoal.errors import QueueUnavailable
from shoal.queue.interface import Queue
from shoal.worker.device import Loading
from shoal.worker.peers import LEASE_S, Lease, Leases
from shoal.worker.picture import Picture
from shoal.worker.roster import Roster

log = logging.getLogger(__name__)

NO_LEASE_S = 1.0


@dataclass(frozen=True, slots=True)
class Move:
    """Evictions, and the load that needs them."""

    evictions: tuple[Evict, ...]
    load: Load | None = None


def moves_of(actions: Iterable[Action]) -> list[Move]:
    """Groups a plan: each load with the evictions before it."""
    moves: list[Move] = []
    evictions: list[Evict] = []
    for action in actions:
        if isinstance(action, Evict):
            evictions.append(action)
        elif isinstance(action, Load):
            moves.append(Move(tuple(evictions), action))
            evictions = []
    return [*moves, *(Move((eviction,)) for eviction in evictions)]


class Moves:
    """Performs moves.

    `on_open` is called with an entry whose items may be pulled from now on, `on_told` when other
    workers should hear what has changed.
    """

    def __init__(self, queue: Queue, roster: Roster, picture: Picture, worker: str) -> None:
        self.on_open: Callable[[Entry], None] = lambda _: None
        self.on_told: Callable[[], Awaitable[None]] = _nobody
        self.going: set[str] = set()
        self._queue = queue
        self._roster = roster
        self._picture = picture
        self._residents = picture.residents
        self._leases = Leases(queue.leases, worker)
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, moves: Sequence[Move]) -> None:
        """Begins them all; what they take and load is marked at once, for the next plan."""
        for move in moves:
            self._mark(move.evictions)
            if move.load is None:
                self._spawn(self._evict_all(move.evictions), "evict")
                continue
            entry = self._roster.entries.get(move.load.model)
            device = self._residents.device(move.load.device)
            if entry is None or entry.key in device.loading or entry.key in device.resident:
                self._unmark(move.evictions)
                continue
            device.loading[entry.key] = Loading(entry, monotonic(), "making room")
            self._spawn(self._carry_out(entry, move, move.load), f"load {entry.key}")

    async def _carry_out(self, entry: Entry, move: Move, load: Load) -> None:
        """A load under a lease, after its evictions; nothing is loaded where one of them fails."""
        device, lease = self._residents.device(load.device), None
        loaded = False
        try:
            if not self._picture.peers.alone:
                lease = await self._claim(entry)
                if lease is None:
                    self._picture.refuse(entry.key, NO_LEASE_S)
                    return
            if not await self._evict_all(move.evictions):
                return
            log.info("loading %s on %s: %s", entry.key, load.device, load.why)
            loaded = True
            task = self._residents.load(entry, device)
            self.on_open(entry)
            await self.on_told()
            while not task.done():
                await asyncio.wait([task], timeout=LEASE_S / 3)
                if lease is not None and not task.done():
                    await self._leases.renew(lease)
            self._picture.demand.fulfil(entry.key)
            await self.on_told()
        finally:
            self._unmark(move.evictions)
            if not loaded:
                device.loading.pop(entry.key, None)
            if lease is not None:
                await self._leases.release(lease)

    async def _claim(self, entry: Entry) -> Lease | None:
        try:
            return await self._leases.claim(entry.key, self._picture.slots(entry))
        except QueueUnavailable as error:
            log.debug("lease: %s", error)
            return None

    async def _evict_all(self, evictions: Iterable[Evict]) -> bool:
        gone = await asyncio.gather(*(self.evict(eviction) for eviction in evictions))
        return all(gone)

    async def evict(self, action: Evict) -> bool:
        """Evicts an idle copy; of the last one here nothing more is pulled."""
        key, device = action.model, self._residents.device(action.device)
        loaded = device.resident.get(key)
        if loaded is None or device.is_busy(key):
            device.leaving.discard(key)
            return False
        last = len(self._residents.holders(loaded.entry)) == 1
        if last:
            self.going.add(key)
        try:
            if last:
                for line in self._roster.lines_of(key):
                    await self._queue.withdraw(key, line.lane)
            return await self._residents.evict(key, device, action.why)
        finally:
            self.going.discard(key)
            device.leaving.discard(key)

    def _mark(self, evictions: Iterable[Evict]) -> None:
        for eviction in evictions:
            self._residents.device(eviction.device).leaving.add(eviction.model)

    def _unmark(self, evictions: Iterable[Evict]) -> None:
        for eviction in evictions:
            self._residents.device(eviction.device).leaving.discard(eviction.model)

    def spawn_evictions(self, entry: Entry, why: str) -> None:
        """Evicts all copies of a model that are idle, in a task of its own."""
        evictions = [Evict(entry.key, d.name, why) for d in self._residents.holders(entry)]
        self._mark(evictions)
        self._spawn(self._evict_and_tell(evictions), "evict")

    async def _evict_and_tell(self, evictions: Iterable[Evict]) -> None:
        await self._evict_all(evictions)
        await self.on_told()

    def _spawn(self, work: object, name: str) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a move failed", exc_info=task.exception())

    async def close(self) -> None:
        """Ends what is left; leases are given back."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _nobody() -> None:
    return
