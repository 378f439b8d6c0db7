"""Which items run together: the first batch former.

Owns the length partition and the look-ahead window of one (model, lane). Pure: time is an
argument. Does not own pulling, devices or the choice among models beyond the oldest head.

The cost of running sequences as one padded block is `launch + longest * count` tokens: every
sequence is padded to the longest, and each forward pass has a fixed price. Sorted by length, an
optimal partition has contiguous blocks, so one pass of dynamic programming finds it:
F[i] = min over j of F[j] + launch + longest_i * (count of j..i).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.core.types import Batch, Item, Lane

LAUNCH_TOKENS = 32
BULK_HANDICAP_S = 1.0


def _blocks(
    sizes: Sequence[tuple[int, int]], budget_tokens: int, launch_tokens: int
) -> list[tuple[int, int]]:
    """Cuts `sizes`, (length, count) pairs in ascending length, into the cheapest blocks.

    Returns (start, end) index pairs. A block's padded tokens stay within the budget unless it is
    a single entry that is over it alone.
    """
    n = len(sizes)
    total = sum(count for _, count in sizes)
    useful = sum(length * count for length, count in sizes)
    padded = sizes[-1][0] * total if sizes else 0
    if padded <= budget_tokens and padded - useful <= launch_tokens:
        return [(0, n)] if n else []  # a cut costs a launch and cannot save more than the padding
    best = [0.0] * (n + 1)
    cut = [0] * (n + 1)
    for i in range(1, n + 1):
        length = sizes[i - 1][0]
        count = 0
        best[i] = float("inf")
        for j in range(i - 1, -1, -1):
            count += sizes[j][1]
            block = length * count
            if block > budget_tokens and j < i - 1:
                break
            cost = best[j] + launch_tokens + block
            if cost < best[i]:
                best[i], cut[i] = cost, j
    blocks: list[tuple[int, int]] = []
    end = n
    while end:
        blocks.append((cut[end], end))
        end = cut[end]
    return blocks[::-1]


def partition(
    lengths_tokens: Sequence[int], budget_tokens: int, launch_tokens: int = LAUNCH_TOKENS
) -> list[list[int]]:
    """Groups sequences into padded forward passes: lists of indices, short ones first.

    The sum of `launch + longest * count` over the groups is minimal among partitions whose groups
    keep within `budget_tokens`; a sequence longer than the budget runs alone.
    """
    order = sorted(range(len(lengths_tokens)), key=lengths_tokens.__getitem__)
    sizes = [(lengths_tokens[i], 1) for i in order]
    return [order[start:end] for start, end in _blocks(sizes, budget_tokens, launch_tokens)]


class Window:
    """The look-ahead of one (model, lane): items that are here and not running.

    `next_batch` always includes the oldest item, so an item waits for at most the items that were
    here before it. Among the rest it takes those whose length is near the oldest's, as far as the
    optimal partition of the whole window puts them into the same block.
    With `packing` (a runtime that runs ragged sequences without padding) lengths do not matter:
    oldest first until the budget is reached.
    """

    def __init__(
        self,
        model: str,
        lane: Lane,
        *,
        budget_tokens: int,
        max_items: int,
        packing: bool = False,
        launch_tokens: int = LAUNCH_TOKENS,
    ) -> None:
        self.model = model
        self.lane = lane
        self.max_items = max_items
        self.tokens = 0
        self._budget_tokens = budget_tokens
        self._launch_tokens = launch_tokens
        self._packing = packing
        self._items: dict[str, Item] = {}

    def __len__(self) -> int:
        return len(self._items)

    @property
    def head(self) -> Item | None:
        """The oldest item."""
        return next(iter(self._items.values()), None)

    def ids(self) -> list[str]:
        """The ids of all items, oldest first."""
        return list(self._items)

    def add(self, item: Item) -> bool:
        """Takes an item in; False when the window is full or holds the item already."""
        if len(self._items) >= self.max_items or item.id in self._items:
            return False
        self._items[item.id] = item
        self.tokens += item.tokens
        return True

    def remove(self, item_ids: Iterable[str]) -> list[Item]:
        """Takes items out (cancelled ones); ids that are not here are passed over."""
        gone = [self._items.pop(i) for i in item_ids if i in self._items]
        self.tokens -= sum(item.tokens for item in gone)
        return gone

    def expire(self, now: float) -> list[Item]:
        """Takes out the items whose deadline has passed at `now` (wall-clock seconds)."""
        return self.remove([i.id for i in self._items.values() if i.deadline_s <= now])

    def next_batch(self) -> Batch | None:
        """The oldest item and its best company; None when there is nothing here."""
        if not self._items:
            return None
        chosen = self._fifo() if self._packing else self._block_of_head()
        self.remove([item.id for item in chosen])
        return Batch(self.model, tuple(chosen), self._cost(chosen))

    def _cost(self, items: Sequence[Item]) -> int:
        if self._packing:
            return sum(item.tokens for item in items)
        longest = max(item.longest_tokens for item in items)
        return longest * sum(len(item.lengths_tokens) for item in items)

    def _fifo(self) -> list[Item]:
        chosen: list[Item] = []
        tokens = 0
        for item in self._items.values():
            if chosen and tokens + item.tokens > self._budget_tokens:
                break
            chosen.append(item)
            tokens += item.tokens
        return chosen

    def _block_of_head(self) -> list[Item]:
        items = list(self._items.values())
        order = sorted(range(len(items)), key=lambda i: items[i].longest_tokens)
        sizes = [(items[i].longest_tokens, len(items[i].lengths_tokens)) for i in order]
        head_at = order.index(0)
        for start, end in _blocks(sizes, self._budget_tokens, self._launch_tokens):
            if start <= head_at < end:
                return [items[i] for i in sorted(order[start:end])]
        return [items[0]]


def oldest_head(windows: Iterable[Window]) -> Window | None:
    """The window to serve next: the oldest head, bulk heads counted as arrived a little later.

    Work in the bulk lane yields to interactive work that came up to `BULK_HANDICAP_S` after it,
    and to none that came later, so neither lane starves.
    """

    def virtual_arrival_s(window: Window) -> float:
        head = window.head
        arrived_s = head.arrived_s if head else float("inf")
        return arrived_s + (BULK_HANDICAP_S if window.lane == "bulk" else 0.0)

    return min((w for w in windows if len(w)), key=virtual_arrival_s, default=None)
