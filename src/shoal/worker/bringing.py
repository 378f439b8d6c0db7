"""From an item to its adapter, before the item is placed.

Owns the wait for an adapter's files, and leaving an item to another worker where its adapter cannot
be had here and can be there. Does not own the files (`adapter_files`), what others say of
themselves (`peers`), or where an item waits that has what it needs (`placing`).
"""

from __future__ import annotations

import asyncio
import logging

from shoal.catalog.schema import Entry
from shoal.clock import wall
from shoal.errors import DeadlineExceeded, RuntimeFault, ShoalError
from shoal.worker.adapters import Adapters
from shoal.worker.held import Held, HeldItem
from shoal.worker.peers import Peers

log = logging.getLogger(__name__)

# Whoever pulls next may be this worker again: an item rests for a share of its age in between.
_REST_SHARE = 0.25
_LEAST_REST_S = 0.1
_MOST_REST_S = 1.0


class Bringing:
    """The adapters of items that are to be placed."""

    def __init__(self, held: Held, adapters: Adapters, peers: Peers) -> None:
        self._held = held
        self._adapters = adapters
        self._peers = peers

    def is_near(self, entry: Entry, key: str) -> bool:
        """Whether there is nothing to be waited for, as far as is known."""
        return self._adapters.takes(entry) and self._adapters.files.is_near(key)

    async def bring(self, entry: Entry, item: HeldItem, key: str) -> ShoalError | None:
        """Waits until an item can be placed; why it cannot, unless it was left to another worker.

        Then it is in hand no more.
        """
        envelope = item.envelope
        try:
            async with asyncio.timeout(envelope.deadline_s - wall()):
                self._adapters.check(entry)
                await self._adapters.files.fetch(key)
        except TimeoutError:
            return DeadlineExceeded(f"adapter {key} was not here by the deadline")
        except RuntimeFault as error:
            return None if await self._leave(entry, item, key) else error
        except ShoalError as error:
            return error
        return None

    async def _leave(self, entry: Entry, item: HeldItem, key: str) -> bool:
        """Gives an item back where another worker can have its adapter; it lost no attempt."""
        now_s = wall()
        age_s = now_s - item.envelope.submitted_s
        rest_s = min(_MOST_REST_S, max(_LEAST_REST_S, age_s * _REST_SHARE))
        if now_s + rest_s >= item.envelope.deadline_s:
            return False
        if not self._peers.can_adapt(entry.key, key) or not self._held.has(item):
            return False
        log.debug("item %s is left to a worker that has %s", item.envelope.item, key)
        await self._held.give_back([item.envelope.item], rest_s)
        return True
