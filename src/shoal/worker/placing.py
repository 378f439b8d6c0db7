"""From a prepared item to where it waits: the window of its line, or the texts that want a slot.

Owns that step; an item whose adapter is not near waits outside, so that its line's others pass.
Does not own preparing (`intake`), bringing adapters (`bringing`), or whose turn it is (`dispatch`,
`streams`).
"""

from __future__ import annotations

import asyncio

from msgspec import structs

from shoal.catalog.schema import Entry
from shoal.clock import monotonic, wall
from shoal.core.types import Item
from shoal.errors import Bug, ShoalError
from shoal.ipc.messages import RunItem
from shoal.worker.bringing import Bringing
from shoal.worker.costs import CostBook
from shoal.worker.dispatch import Dispatch
from shoal.worker.held import Held, HeldItem
from shoal.worker.lines import Line
from shoal.worker.roster import Roster
from shoal.worker.streams import Streams


class Placing:
    """Puts prepared items where they wait, and takes them away again."""

    def __init__(
        self,
        held: Held,
        roster: Roster,
        dispatch: Dispatch,
        streams: Streams,
        *,
        costs: CostBook,
        bringing: Bringing,
    ) -> None:
        self._held = held
        self._roster = roster
        self._dispatch = dispatch
        self._streams = streams
        self._costs = costs
        self._bringing = bringing
        self._tasks: set[asyncio.Task[None]] = set()

    def wake(self) -> None:
        """Items were placed."""
        self._dispatch.wake()

    async def place(self, entry: Entry, item: HeldItem, made: RunItem | ShoalError) -> None:
        """Places an item that was prepared for a model as `entry` has it, or ends it."""
        envelope = item.envelope
        line = self._roster.lines.get((entry.key, envelope.lane))
        if line is not None:
            line.on_prepared(sum(made.lengths) if isinstance(made, RunItem) else 0)
        if isinstance(made, RunItem) and envelope.adapter:
            made = structs.replace(made, adapter=envelope.adapter)
            if not self._bringing.is_near(entry, envelope.adapter):
                task = asyncio.create_task(self._place_later(entry, item, made), name="adapter")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                return
        await self._place(entry, item, made)

    async def _place_later(self, entry: Entry, item: HeldItem, made: RunItem) -> None:
        fault = await self._bringing.bring(entry, item, made.adapter)
        await self._place(entry, item, fault or made)
        self.wake()

    async def _place(self, entry: Entry, item: HeldItem, made: RunItem | ShoalError) -> None:
        if not self._held.has(item):  # cancelled or given back, and perhaps delivered anew
            return
        name = item.envelope.item
        line = self._roster.lines.get((entry.key, item.envelope.lane))
        if line is None or line.entry.runtime != entry.runtime:  # gone, or served by another one
            await self._held.give_back([name])
        elif isinstance(made, RunItem):
            await self._add(line, item, made)
        elif item.failures:
            await self._held.fail_inputs(name)
        else:
            await self._held.fail(name, made)

    async def _add(self, line: Line, item: HeldItem, made: RunItem) -> None:
        envelope, entry = item.envelope, line.entry
        item.run_item = made
        waiting = Item(
            envelope.item,
            entry.key,
            envelope.lane,
            tuple(made.lengths),
            monotonic() + envelope.deadline_s - wall(),
            item.arrived_s,
            envelope.tenant or "",
            solo=item.delivery.attempt > 1,
            request=envelope.request,
            size_bytes=len(made.ids) + sum(map(len, made.blobs)),
        )
        if envelope.payload is None and not entry.generates:  # its engine counts, at the end
            self._costs.on_text(entry, len(bytes(envelope.body)), sum(made.lengths))
        if entry.generates:
            self._streams.add(entry, waiting)
        elif not self._dispatch.add(waiting):
            await self._held.fail(envelope.item, Bug("the window is full"))

    def remove(self, item_id: str) -> bool:
        """Takes an item away that nobody waits for any more; False where a batch of it runs."""
        return bool(self._dispatch.remove([item_id])) or self._streams.stop(item_id)

    async def close(self) -> None:
        """Ends what is left; its items stay in hand."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
