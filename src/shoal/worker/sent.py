"""The outcomes that this worker has sent lately, in case one did not arrive.

Outcomes are not stored by the broker, and an item is acked right after its outcome has been sent.
When a broker dies, or a gateway connects again a moment later than a worker, an outcome can be lost
whose item is done with. So each is kept for a while, and sent again to whoever says that it is
missing. Owns the bound on what is kept. Does not own when somebody asks (`shoal.gateway.recall`).
"""

from __future__ import annotations

import asyncio
import logging

from shoal.errors import QueueUnavailable
from shoal.queue.interface import Queue
from shoal.wire.envelope import Missing, UnreadableMessage, decode_missing

log = logging.getLogger(__name__)

MAX_OUTCOMES = 16_384
MAX_BYTES = 32 * 1024 * 1024
MAX_REQUESTS = 256


class SentOutcomes:
    """Outcomes by item id, the oldest first; bounded by number and by bytes."""

    def __init__(
        self, queue: Queue, *, max_outcomes: int = MAX_OUTCOMES, max_bytes: int = MAX_BYTES
    ) -> None:
        self._queue = queue
        self._max_outcomes = max_outcomes
        self._max_bytes = max_bytes
        self._outcomes: dict[str, bytes] = {}
        self._size_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._outcomes)

    def add(self, item_id: str, data: bytes) -> None:
        """Keeps an outcome that has been sent."""
        self._size_bytes += len(data) - len(self._outcomes.pop(item_id, b""))
        self._outcomes[item_id] = data
        while len(self._outcomes) > self._max_outcomes or self._size_bytes > self._max_bytes:
            self._size_bytes -= len(self._outcomes.pop(next(iter(self._outcomes))))

    def on_missing(self, data: bytes) -> None:
        """Sends again what a gateway misses and this worker has sent."""
        try:
            missing = decode_missing(data)
        except UnreadableMessage as error:
            log.debug("missing: %s", error)
            return
        if len(self._tasks) >= MAX_REQUESTS:
            log.warning("too many gateways ask for lost outcomes at once; one is passed over")
        elif any(item in self._outcomes for item in missing.items):
            task = asyncio.create_task(self._send(missing), name="send outcomes again")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send(self, missing: Missing) -> None:
        found = [data for item in missing.items if (data := self._outcomes.get(item)) is not None]
        log.info("sending %d outcomes again", len(found))
        try:
            for data in found:
                await self._queue.reply(missing.inbox, data)
        except QueueUnavailable as error:
            log.warning("outcomes could not be sent again: %s", error)

    async def on_back(self) -> None:
        """The broker was away: what was sent last may be lost, so gateways are to ask."""
        try:
            await self._queue.tell("back", b"")
        except QueueUnavailable as error:
            log.debug("back: %s", error)
