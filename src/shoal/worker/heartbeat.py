"""What the worker says of itself each second, and its gauges.

Owns making the status message from the rooms' states. Does not own when it is sent, or what others
do with it.
"""

from __future__ import annotations

import math

from shoal.catalog.schema import Entry
from shoal.clock import monotonic
from shoal.wire.envelope import MemoryState, ModelState, Status
from shoal.worker.choice import Choices
from shoal.worker.costs import CostBook
from shoal.worker.held import Held
from shoal.worker.metrics import Metrics
from shoal.worker.residency import Residency
from shoal.worker.roster import Roster
from shoal.worker.streams import Streams


class Heartbeat:
    """The status of one worker."""

    def __init__(
        self,
        worker: str,
        roster: Roster,
        residency: Residency,
        held: Held,
        streams: Streams,
        *,
        costs: CostBook,
        choices: Choices,
        metrics: Metrics,
    ) -> None:
        self._worker = worker
        self._roster = roster
        self._residency = residency
        self._held = held
        self._streams = streams
        self._costs = costs
        self._choices = choices
        self._metrics = metrics
        self._counted = (0, 0.0, 0)

    def status(self, *, draining: bool) -> Status:
        """The message as of now."""
        memories = [
            MemoryState(memory.name, memory.budget_bytes, memory.used_bytes)
            for memory in self._residency.memories()
        ]
        self._measure(memories)
        return Status(
            self._worker,
            [self._model(entry) for entry in self._roster.entries.values()],
            devices=len(self._residency.residents.devices),
            held_items=len(self._held),
            draining=draining,
            memories=memories,
        )

    def _model(self, entry: Entry) -> ModelState:
        residents, now_s = self._residency.residents, monotonic()
        reason = self._roster.unservable.get(entry.key)
        found = residents.state(entry)
        state = "unavailable" if reason else "loading" if found == "fetching" else found
        fault = residents.fault(entry)
        loads = residents.loads_of(entry)
        holders = residents.holders(entry)
        used_s = max((d.resident[entry.key].used_s for d in holders), default=-math.inf)
        measured = residents.sizes.measured(entry)
        return ModelState(
            entry.key,
            state,
            reason or (loads[0].phase if loads else fault.message if fault else ""),
            token_s=self._costs.token_s(entry),
            bytes_per_token=self._costs.rates(entry).bytes_per_token,
            item_s=self._costs.rates(entry).item_s,
            full_s=self._costs.full_s(entry),
            devices=[device.name for device in holders],
            memory_bytes=measured.size_bytes if measured else 0,
            load_s=measured.load_s if measured else 0.0,
            loading_s=now_s - min(load.begun_s for load in loads) if loads else 0.0,
            idle_s=now_s - used_s if holders else 0.0,
            growing=sum(device.resident[entry.key].texts for device in holders),
            at_once=self._streams.at_once(entry) if entry.generates else 0,
            runtime=entry.runtime if self._choices.has_choice(entry.key) else "",
            others=self._choices.others(entry.key),
            adapters=residents.adapters.states(entry, holders),
            adapts=residents.adapters.takes(entry),
            faulty=residents.adapters.files.faulty(entry.id),
        )

    def _measure(self, memories: list[MemoryState]) -> None:
        residents, metrics = self._residency.residents, self._metrics
        for (model, lane), line in self._roster.lines.items():
            metrics.window.labels(model, lane).set(line.waiting)
        metrics.held.set(len(self._held))
        before, self._counted = (
            self._counted,
            (
                residents.loads,
                residents.load_seconds,
                residents.evictions,
            ),
        )
        metrics.loads.inc(residents.loads - before[0])
        metrics.load_s.inc(residents.load_seconds - before[1])
        metrics.evictions.inc(residents.evictions - before[2])
        metrics.residents.set(sum(len(device.resident) for device in residents.devices))
        for memory in memories:
            metrics.memory_used.labels(memory.name).set(memory.used_bytes)
            metrics.memory_budget.labels(memory.name).set(memory.budget_bytes)
