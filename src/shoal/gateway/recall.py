"""Asks the workers again for outcomes that may have been lost on their way.

An outcome is not stored by the broker. After this gateway or a worker has lost its connection, the
outcomes that were on their way then may never come, although their items are done: so the gateway
names the items it waits for, and a worker that has answered one answers it again. Owns when to ask.
Does not own what is waited for (`submit`) or what was sent (`shoal.worker.sent`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from shoal.errors import QueueUnavailable
from shoal.queue.interface import Queue
from shoal.wire.envelope import Missing, encode

log = logging.getLogger(__name__)

# Many workers come back at the same time: one question is enough for all.
GATHER_S = 0.2
ITEMS_PER_MESSAGE = 4096


class Recall:
    """Asks for what `waiting` names, `gather_s` after there was a reason to."""

    def __init__(
        self,
        queue: Queue,
        waiting: Callable[[], Sequence[str]],
        *,
        gather_s: float = GATHER_S,
        max_items: int = ITEMS_PER_MESSAGE,
    ) -> None:
        self._queue = queue
        self._waiting = waiting
        self._gather_s = gather_s
        self._max_items = max_items
        self._due: asyncio.Task[None] | None = None

    def on_back(self, _: bytes) -> None:
        """A worker has lost its connection and has one again."""
        if self._due is None or self._due.done():
            self._due = asyncio.create_task(self._ask(), name="recall")

    async def ask_soon(self) -> None:
        """This gateway has lost its connection and has one again."""
        self.on_back(b"")

    async def _ask(self) -> None:
        await asyncio.sleep(self._gather_s)
        items = self._waiting()
        try:
            for at in range(0, len(items), self._max_items):
                some = list(items[at : at + self._max_items])
                await self._queue.tell("missing", encode(Missing(self._queue.inbox, some)))
        except QueueUnavailable as error:
            log.debug("asking again: %s", error)
