"""One (model, lane) as this worker serves it, and how much of it the worker may hold.

Owns the bound on held work: a window to choose from, what runs and one batch ahead on each device,
and the size of the next pull. Does not own pulling (`intake`) or batches (`dispatch`).
"""

from __future__ import annotations

from shoal.catalog.schema import Entry
from shoal.core.batching import Window
from shoal.core.types import Batch, Lane

FIRST_PULL = 8
MOST_PULL = 256
_SMOOTHING = 0.1


class Line:
    """Counts what is held of one line. Tokens are exact for prepared items, else estimates."""

    def __init__(self, entry: Entry, lane: Lane, *, devices: int, window_items: int) -> None:
        self.entry = entry
        self.lane = lane
        self.budget_tokens = entry.profile.batch_tokens
        self.window = Window(
            entry.id, lane, budget_tokens=self.budget_tokens, max_items=window_items
        )
        self.preparing = 0
        self.promised = 0
        self._in_flight_tokens = 0
        self._max_held_tokens = self.budget_tokens * (3 * devices + 1)
        self._item_tokens = self.budget_tokens / 8
        self._pull_size = FIRST_PULL

    @property
    def full_batch(self) -> bool:
        """Whether the window holds a batch that waiting would not make better."""
        return self.window.tokens >= self.budget_tokens

    def next_pull(self) -> int:
        """How many items to pull now; 0 while a pull is open or there is no room."""
        if self.promised:
            return 0
        held_tokens = (
            self.window.tokens + self._in_flight_tokens + self.preparing * self._item_tokens
        )
        by_tokens = int((self._max_held_tokens - held_tokens) / self._item_tokens)
        by_items = self.window.max_items - len(self.window) - self.preparing
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

    def on_sent(self, batch: Batch) -> None:
        """A batch has left for a device."""
        self._in_flight_tokens += sum(item.tokens for item in batch.items)

    def on_back(self, batch: Batch) -> None:
        """A batch has come back from its device."""
        self._in_flight_tokens -= sum(item.tokens for item in batch.items)
