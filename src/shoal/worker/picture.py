"""What the residency policy is told: the worker as it is at one moment.

Owns putting together what the other rooms know: copies, memories, what is asked of each model,
what it takes and who else has it. Does not own measuring any of it, or what follows (`residency`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shoal.catalog.schema import Entry
from shoal.clock import monotonic
from shoal.core.residency import Copy, Demand, Held, Memory
from shoal.worker.costs import CostBook
from shoal.worker.demand import DemandBook
from shoal.worker.device import Device
from shoal.worker.fetches import Fetches
from shoal.worker.memory import HOST, Memories, memory_of, resident_bytes
from shoal.worker.peers import Peers
from shoal.worker.resident import Residents
from shoal.worker.roster import Roster

RETIRED_IDLE_S = 5.0
DOUBTED = 2.0
LOADS_AT_ONCE = 8  # of one model, in a pool
_LEAST_LOAD_S = 0.1
_AT_WORK_S = 0.2


@dataclass(frozen=True, slots=True)
class _Size:
    size_bytes: int
    load_s: float
    measured: bool


class Picture:
    """The worker's models, devices and memories, for the policy."""

    def __init__(
        self,
        roster: Roster,
        residents: Residents,
        memories: Memories,
        peers: Peers,
        *,
        fetches: Fetches,
        costs: CostBook,
    ) -> None:
        self.residents = residents
        self.peers = peers
        self.demand = DemandBook()
        self._fetches = fetches
        self._roster = roster
        self._memories = memories
        self._costs = costs
        self._refused: dict[str, float] = {}
        self._beside_bytes: dict[str, int] = {}
        self._grown_bytes: dict[tuple[str, str], int] = {}

    def refuse(self, model: str, for_s: float) -> None:
        """Other workers load it just now: it is not tried here for a while."""
        self._refused[model] = monotonic() + for_s

    def memories(self) -> tuple[Memory, ...]:
        """The memories now, as they are measured."""
        return self._memories.state(self.residents.pids())

    def growing(self) -> dict[str, int]:
        """How many texts of each generator grow, here and at other workers."""
        growing = dict(self.peers.growing())
        for device in self.residents.devices:
            for key, loaded in device.resident.items():
                if loaded.texts:
                    growing[key] = growing.get(key, 0) + loaded.texts
        return growing

    def here(self) -> set[str]:
        """The models that are loaded, without those that wait behind others beside an idle device.

        A model whose device runs another's long batch is, for its waiting items, as good as cold.
        """
        devices = self.residents.devices
        here = {key for device in devices for key in device.resident}
        if all(device.in_flight for device in devices):
            return here
        return {key for key in here if not self._is_held_up(key)}

    def _is_held_up(self, key: str) -> bool:
        holders = [device for device in self.residents.devices if key in device.resident]
        if any(device.resident[key].entry.generates for device in holders):
            return False  # its texts grow beside the batches of others
        others = all(device.in_flight and not device.is_busy(key) for device in holders)
        return others and any(line.waiting for line in self._roster.lines_of(key))

    def held(self, now_s: float) -> Held:
        """All of it."""
        devices = self.residents.devices
        copies = [copy for device in devices for copy in self._copies(device)]
        elsewhere = self.peers.copies()
        memories = [self._for_models(memory, copies) for memory in self.memories()]
        most_bytes = max((self._most_bytes(memory, copies) for memory in memories), default=0)
        return Held(
            memories=tuple(memories),
            copies=tuple(copies),
            demands=tuple(
                self._demand_of(entry, elsewhere, most_bytes, now_s)
                for entry in self._roster.servable()
            ),
            loading=tuple(
                (key, device.name)
                for device in devices
                for key in device.loading
                if key in self._roster.entries
            ),
            idle_devices=frozenset(d.name for d in devices if not d.in_flight),
        )

    def _copies(self, device: Device) -> Iterable[Copy]:
        """The copies on a device. What their process has grown by since their loads is theirs, too.

        It cannot be told apart while the process loads another model; then it is what it was.
        """
        for name, process in device.processes.items():
            held = {k: c for k, c in device.resident.items() if c.entry.process == name}
            leaving = device.leaving & held.keys()
            place = (device.name, name)
            sizes_bytes = sum(loaded.size_bytes for loaded in held.values())
            at_load = any(load.entry.process == name for load in device.loading.values())
            if memory_of(device.name) == HOST and process.pid is not None and not at_load:
                grown_bytes = resident_bytes(process.pids) - process.base_bytes - sizes_bytes
                self._grown_bytes[place] = max(0, grown_bytes)
            grown_bytes = self._grown_bytes.get(place, 0)
            for key, loaded in held.items():
                if key in leaving or key not in self._roster.entries:
                    continue
                share = loaded.size_bytes / sizes_bytes if sizes_bytes else 1 / len(held)
                yield Copy(
                    key,
                    device.name,
                    loaded.size_bytes + int(grown_bytes * share),
                    loaded.since_s,
                    loaded.used_s,
                    busy=device.is_busy(key),
                )

    def _for_models(self, memory: Memory, copies: Iterable[Copy]) -> Memory:
        """A memory without what the processes take before their first model: it stays taken.

        A load under way counts with the size that it is expected to have. What a GPU's processes
        take beside their models is known while nothing is being loaded.
        """
        models_bytes = sum(copy.size_bytes for copy in copies if copy.device in memory.devices)
        loads = [
            loading.entry
            for device in self.residents.devices
            if device.name in memory.devices
            for loading in device.loading.values()
        ]
        if memory.name == HOST:
            self._beside_bytes[HOST] = self.residents.base_bytes()
        elif not loads:
            self._beside_bytes[memory.name] = max(0, memory.used_bytes - models_bytes)
        beside_bytes = self._beside_bytes.get(memory.name, 0)
        return replace(
            memory,
            budget_bytes=max(0, memory.budget_bytes - beside_bytes),
            used_bytes=models_bytes + sum(self.residents.sizes.size_bytes(e) for e in loads),
        )

    def _most_bytes(self, memory: Memory, copies: Iterable[Copy]) -> int:
        """What one model could have there if all went that is not pinned."""
        pinned = {key for key, entry in self._roster.entries.items() if entry.pinned}
        stay = [c for c in copies if c.device in memory.devices and c.model in pinned]
        return max(0, memory.budget_bytes - sum(copy.size_bytes for copy in stay))

    def _demand_of(
        self, entry: Entry, elsewhere: dict[str, int], most_bytes: int, now_s: float
    ) -> Demand:
        key = entry.key
        size = self._size(entry, most_bytes)
        retired = key in self._roster.retired
        pinned = entry.pinned and not retired
        there = elsewhere.get(key, 0)
        least = 0 if retired else max(entry.min_replicas, int(pinned))
        match self.demand.wished(key, now_s):
            case "here":
                least = max(least, there + 1)
            case "somewhere":
                least = max(least, 1)
        return Demand(
            model=key,
            size_bytes=size.size_bytes,
            load_s=size.load_s,
            measured=size.measured,
            waiting=self._waiting(key),
            waited_s=self._waited_s(entry),
            queued=self._queued(entry),
            backlog_s=self.backlog_s(entry),
            pinned=pinned,
            min_copies=least,
            elsewhere=there,
            idle_timeout_s=RETIRED_IDLE_S if retired else entry.idle_timeout_s,
            blocked=self.residents.fault(entry) is not None
            or self._refused_lately(key, now_s)
            or not self._fetches.is_here(entry),
        )

    def _size(self, entry: Entry, most_bytes: int) -> _Size:
        """What a copy takes: as measured here, else by another worker, else as the entry says.

        What nobody has measured must not rule a model out, unless it is far too large.
        """
        sizes, key = self.residents.sizes, entry.key
        size_bytes, load_s = sizes.size_bytes(entry), sizes.load_s(entry)
        if sizes.measured(entry) is not None and not sizes.is_corrected(entry):
            return _Size(size_bytes, load_s, measured=True)
        peer = self.peers.known(key)
        if peer is not None and peer.memory_bytes and not sizes.is_corrected(entry):
            return _Size(peer.memory_bytes, peer.load_s, measured=True)
        if size_bytes <= DOUBTED * most_bytes:
            size_bytes = min(size_bytes, most_bytes)
        return _Size(size_bytes, load_s, measured=sizes.is_corrected(entry))

    def _waited_s(self, entry: Entry) -> float:
        """How long items have waited for a copy; texts of a loaded generator wait for a slot."""
        if entry.generates and self.residents.holders(entry):
            return 0.0
        return self.demand.waited_s(entry.key)

    def _waiting(self, key: str) -> int:
        """Items that wait or run, here or at the broker."""
        here = sum(line.waiting + line.preparing for line in self._roster.lines_of(key))
        return max(here, self.demand.waiting.get(key, 0))

    def _queued(self, entry: Entry) -> int:
        """Items that a further copy could begin now.

        Where the model is not here, what other workers run cannot be told from what waits there:
        what they have at once and a little more is taken for running.
        """
        if entry.generates:
            return 0
        if self.residents.holders(entry):
            return sum(line.waiting for line in self._roster.lines_of(entry.key))
        copies = max(1, self.peers.copies().get(entry.key, 0))
        return self._waiting(entry.key) if self.backlog_s(entry) > copies * _AT_WORK_S else 0

    def queues_beside_idle(self) -> bool:
        """Whether something waits here while a device has nothing to do."""
        idle = any(not device.in_flight for device in self.residents.devices)
        return idle and any(line.waiting for line in list(self._roster.lines.values()))

    def backlog_s(self, entry: Entry) -> float:
        """Device seconds of what waits, by what its items took so far, here or elsewhere."""
        waiting = self._waiting(entry.key)
        if not waiting:
            return 0.0
        item_s = self._costs.rates(entry).item_s
        if not item_s:
            peer = self.peers.known(entry.key)
            item_s = peer.item_s if peer else 0.0
        return waiting * item_s

    def slots(self, entry: Entry) -> int:
        """How many workers may load a model at once: as many as its backlog gives work to."""
        load_s = max(_LEAST_LOAD_S, self.residents.sizes.load_s(entry))
        needed = math.ceil(self.backlog_s(entry) / load_s)
        return min(LOADS_AT_ONCE, max(1, needed - self.peers.copies().get(entry.key, 0)))

    def _refused_lately(self, key: str, now_s: float) -> bool:
        until_s = self._refused.get(key)
        if until_s is not None and until_s <= now_s:
            del self._refused[key]
        return until_s is not None and until_s > now_s
