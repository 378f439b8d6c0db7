"""What a text has grown by, on its way to whoever reads it.

Owns sending pieces in order, those together that come faster than they can be sent. Does not own
the text (`streams`), or what is sent at its end (`held`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from shoal.errors import QueueUnavailable
from shoal.wire.generation import Piece
from shoal.worker.held import Held

log = logging.getLogger(__name__)


class Pieces:
    """What a text has grown by and nobody has been told yet. `sent`: how many pieces were."""

    def __init__(self, held: Held, item_id: str) -> None:
        self.sent = 0
        self._held = held
        self._item_id = item_id
        asked = held[item_id].envelope.params.generation
        self._wanted = asked is not None and asked.stream
        self._new: list[Piece] = []
        self._more = asyncio.Event()
        self._sending = asyncio.create_task(self._send(), name="pieces") if self._wanted else None

    def add(self, piece: Piece) -> None:
        """Takes a piece; those that come faster than they can be sent go together."""
        if self._wanted:
            self._new.append(piece)
            self._more.set()

    async def _send(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            await self._flush()

    async def _flush(self) -> None:
        if not self._new:
            return
        piece, self._new = _joined(self._new), []
        try:
            await self._held.grow(self._item_id, piece, self.sent)
        except QueueUnavailable as error:  # the whole text comes at the end
            log.debug("a piece of %s: %s", self._item_id, error)
        self.sent += 1

    async def close(self) -> None:
        """Sends what is there, and nothing more."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
            await self._flush()

    def drop(self) -> None:
        """Sends nothing more."""
        self._new.clear()
        if self._sending is not None:
            self._sending.cancel()


def _joined(pieces: Sequence[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    return Piece(
        "".join(piece.text for piece in pieces),
        sum(piece.tokens for piece in pieces),
        [logprob for piece in pieces for logprob in piece.logprobs],
    )
