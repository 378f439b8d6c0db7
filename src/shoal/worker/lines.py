"""One (model, lane) as this worker serves it, and how much of it the worker may hold.

Owns the bound on held work: a window to choose from, what runs and one batch ahead on each device,
and the size of the next pull. Does not own pulling (`intake`) or batches (`dispatch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shoal.catalog.schema import Entry
from shoal.core.types import Batch, Item, Lane

FIRST_PULL = 8
MOST_PULL = 256
MAX_WAITING_BYTES = 256 * 1024 * 1024
WINDOW_BATCHES = 2
_SMOOTHING = 0.1


class Line:
    """Counts what is held of one line. Tokens are exact for prepared items, else estimates.

    budget_tokens: a full batch's padded tokens, as the policy says at the moment.
    """

    def __init__(
        self, entry: Entry, lane: Lane, *, devices: int, window_items: int, budget_tokens: int
    ) -> None:
        self.entry = entry
        self.lane = lane
        self.budget_tokens = budget_tokens
        self.preparing = 0
        self.promised = 0
        self.waiting = 0
        self.waiting_tokens = 0
        self.waiting_bytes = 0
        self._devices = devices
        self._max_items = window_items
        self._item_tokens = budget_tokens / 8
        self._in_flight = 0
        self._in_flight_tokens = 0
        self._pull_size = FIRST_PULL

    def next_pull(self) -> int:
        """How many items to pull now; 0 while a pull is open or there is no room."""
        if self.promised or self.waiting_bytes >= MAX_WAITING_BYTES:
            return 0
        # Executing and staged on each device, and as much again to choose from.
        max_held_tokens = self.budget_tokens * (2 + WINDOW_BATCHES) * self._devices
        held_tokens = (
            self.waiting_tokens + self._in_flight_tokens + self.preparing * self._item_tokens
        )
        by_tokens = int((max_held_tokens - held_tokens) / self._item_tokens)
        by_items = self._max_items - self.waiting - self.preparing
        if self.waiting + self.preparing + self._in_flight < self._devices:
            # Items larger than the bound must pass too, and no device idles for want of one.
            by_tokens = max(1, by_tokens)
        return max(0, min(by_tokens, by_items, self._pull_size))

    def on_delivery(self) -> None:
        """An item of the open pull has come."""
        self.promised = max(0, self.promised - 1)
        self.preparing += 1

    def on_pull_end(self) -> None:
        """The open pull is over: the next is larger after a full one, small after an empty one."""
        filled = self.promised == 0
        self._pull_size = min(MOST_PULL, self._pull_size * 2) if filled else FIRST_PULL
        self.promised = 0

    def on_prepared(self, tokens: int) -> None:
        """An item is ready (its tokens), or has failed on the way (0)."""
        self.preparing -= 1
        if tokens:
            self._item_tokens += _SMOOTHING * (tokens - self._item_tokens)

    def on_added(self, item: Item) -> None:
        """An item waits for its batch."""
        self.waiting += 1
        self.waiting_tokens += item.tokens
        self.waiting_bytes += item.size_bytes

    def on_removed(self, items: Iterable[Item]) -> None:
        """Items wait no more."""
        for item in items:
            self.waiting -= 1
            self.waiting_tokens -= item.tokens
            self.waiting_bytes -= item.size_bytes

    def on_sent(self, batch: Batch) -> None:
        """A batch has left for a device."""
        self.on_removed(batch.items)
        self._in_flight += len(batch.items)
        self._in_flight_tokens += batch.tokens

    def on_back(self, batch: Batch) -> None:
        """A batch has come back from its device."""
        self._in_flight -= len(batch.items)
        self._in_flight_tokens -= batch.tokens


class SlotLine(Line):
    """A line of a generator: an item is pulled when a slot is free for it, one at a time.

    room: how many could begin now, what is here already counted; set once by whoever knows.
    """

    room: Callable[[Entry, Lane], int] = staticmethod(lambda _, __: 0)

    def next_pull(self) -> int:
        """One while there is room, and no pull is open."""
        return 1 if not self.promised and self.room(self.entry, self.lane) else 0
