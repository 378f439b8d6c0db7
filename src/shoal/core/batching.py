"""Which items of a line run together.

Owns the length partition and the look-ahead window of one (model, lane). Pure: time is an
argument. Does not own pulling, devices, or which line is next (`schedule`).

The cost of running sequences as one padded block is `launch + longest * count` tokens: every
sequence is padded to the longest, and each forward pass has a fixed price. Sorted by length, an
optimal partition has contiguous blocks, so one pass of dynamic programming finds it:
F[i] = min over j of F[j] + launch + longest_i * (count of j..i).
The window keeps its items by length, so that pass runs over the distinct lengths and not over the
items: its price hardly grows with the window.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from shoal.core.shares import Shares
from shoal.core.types import Item, Lane

LAUNCH_TOKENS = 32


def _blocks(
    sizes: Sequence[tuple[int, int]], budget_tokens: int, launch_tokens: float
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


def padded_tokens(item: Item) -> int:
    """The tokens of an item that runs as one padded pass."""
    return item.longest_tokens * len(item.lengths_tokens)


def partition(
    lengths_tokens: Sequence[int], budget_tokens: int, launch_tokens: float = LAUNCH_TOKENS
) -> list[list[int]]:
    """Groups sequences into padded forward passes: lists of indices, short ones first.

    The sum of `launch + longest * count` over the groups is minimal among partitions whose groups
    keep within `budget_tokens`; a sequence longer than the budget runs alone.
    """
    order = sorted(range(len(lengths_tokens)), key=lengths_tokens.__getitem__)
    sizes = [(lengths_tokens[i], 1) for i in order]
    return [order[start:end] for start, end in _blocks(sizes, budget_tokens, launch_tokens)]


_MOST_GONE = 64
MAX_BATCH_BYTES = 64 * 1024 * 1024  # a frame to a runtime holds four times that


class _Request:
    """A call's items that are here, oldest first, and their padded tokens."""

    __slots__ = ("items", "tokens")

    def __init__(self) -> None:
        self.items: dict[str, Item] = {}
        self.tokens = 0


class _Tenant:
    """A tenant's calls that have something here, and whose turn it is among them."""

    __slots__ = ("requests", "shares")

    def __init__(self) -> None:
        self.requests: dict[str, _Request] = {}
        self.shares = Shares()

    @property
    def tokens(self) -> int:
        return sum(request.tokens for request in self.requests.values())

    def add(self, item: Item) -> None:
        self.shares.enter(item.request)
        request = self.requests.setdefault(item.request, _Request())
        request.items[item.id] = item
        request.tokens += padded_tokens(item)

    def remove(self, item: Item) -> None:
        request = self.requests[item.request]
        del request.items[item.id]
        request.tokens -= padded_tokens(item)
        if not request.items:
            del self.requests[item.request]
            self.shares.leave(item.request)

    def head(self) -> Item:
        """The oldest item of the call that was served least; of several the smallest."""
        name = min(self.requests, key=lambda r: (self.shares.used(r), self.requests[r].tokens))
        return next(iter(self.requests[name].items.values()))


class Window:
    """The look-ahead of one (model, lane): items that are here and not running.

    Every method costs at most the logarithm of the window, but for `take`, which costs what the
    number of distinct lengths does.
    """

    def __init__(self, model: str, lane: Lane, *, max_items: int) -> None:
        self.model = model
        self.lane = lane
        self.max_items = max_items
        self.tokens = 0
        self._items: dict[str, Item] = {}
        self._by_length: dict[int, dict[str, Item]] = {}
        self._sequences: dict[int, int] = {}
        self._shares = Shares()
        self._tenants: dict[str, _Tenant] = {}
        self._head: Item | None = None
        self._starts: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item_id: object) -> bool:
        return item_id in self._items

    def ids(self) -> list[str]:
        """The ids of all items, oldest first."""
        return list(self._items)

    @property
    def head(self) -> Item | None:
        """The oldest item of the request, of the tenant, that was served least."""
        if self._head is None and self._items:
            here = (name for name, tenant in self._tenants.items() if tenant.requests)
            name = min(here, key=lambda t: (self._shares.used(t), self._tenants[t].tokens))
            self._head = self._tenants[name].head()
        return self._head

    def behind(self, most_tokens: int) -> list[Item]:
        """The items of small calls beside a large one, up to so many padded tokens.

        Large is what has had more than its share already, or has more than that waiting. Where
        nothing is large, nobody goes before others.
        """
        small: list[tuple[float, float, _Request]] = []
        large = False
        for name, tenant in self._tenants.items():
            ahead = bool(tenant.requests) and self._shares.is_ahead(name)
            for request, held in tenant.requests.items():
                if ahead or held.tokens > most_tokens or tenant.shares.is_ahead(request):
                    large = True
                else:
                    small.append((self._shares.used(name), tenant.shares.used(request), held))
        if not large:
            return []
        found: list[Item] = []
        for _, _, held in sorted(small, key=lambda one: one[:2]):
            most_tokens -= held.tokens
            if most_tokens < 0:
                break
            found += held.items.values()
        return found

    def add(self, item: Item, latest_start_s: float) -> bool:
        """Takes an item in; False when the window is full or holds the item already.

        latest_start_s: the moment after which it cannot be done by its deadline.
        """
        if len(self._items) >= self.max_items or item.id in self._items:
            return False
        self._items[item.id] = item
        self.tokens += item.tokens
        length = item.longest_tokens
        self._by_length.setdefault(length, {})[item.id] = item
        self._sequences[length] = self._sequences.get(length, 0) + len(item.lengths_tokens)
        if item.tenant not in self._tenants:
            self._forget_tenants()
            self._tenants[item.tenant] = _Tenant()
        self._shares.enter(item.tenant)
        self._tenants[item.tenant].add(item)
        self._head = None
        heapq.heappush(self._starts, (latest_start_s, item.id))
        if len(self._starts) > 2 * self.max_items:  # entries of items that left by another door
            self._starts = [entry for entry in self._starts if entry[1] in self._items]
            heapq.heapify(self._starts)
        return True

    def remove(self, item_ids: Iterable[str]) -> list[Item]:
        """Takes items out; ids that are not here are passed over."""
        gone: list[Item] = []
        for item_id in item_ids:
            item = self._items.pop(item_id, None)
            if item is None:
                continue
            gone.append(item)
            self.tokens -= item.tokens
            length = item.longest_tokens
            bucket = self._by_length[length]
            del bucket[item_id]
            self._sequences[length] -= len(item.lengths_tokens)
            if not bucket:
                del self._by_length[length], self._sequences[length]
            self._leave(item)
        self._head = None
        return gone

    def _leave(self, item: Item) -> None:
        tenant = self._tenants[item.tenant]
        tenant.remove(item)
        if not tenant.requests:
            self._shares.leave(item.tenant)

    def _forget_tenants(self) -> None:
        """Of those who have nothing here only a few are remembered."""
        if len(self._tenants) > 2 * len(self._shares.here) + _MOST_GONE:
            self._tenants = {n: t for n, t in self._tenants.items() if t.requests}

    def expire(self, now: float) -> list[Item]:
        """Takes out the items that cannot be done by their deadlines any more."""
        late: list[str] = []
        while self._starts and self._starts[0][0] <= now:
            late.append(heapq.heappop(self._starts)[1])
        return self.remove(late)

    def most_urgent(self) -> tuple[float, Item] | None:
        """The latest start that comes first, and its item."""
        while self._starts:
            latest_start_s, item_id = self._starts[0]
            item = self._items.get(item_id)
            if item is not None:
                return latest_start_s, item
            heapq.heappop(self._starts)
        return None

    def take(
        self,
        first: Item,
        *,
        budget_tokens: int,
        launch_tokens: float,
        packing: bool,
        also: Sequence[Item] = (),
    ) -> list[Item]:
        """Takes out `first` and its best company within the budget; a solo item has none.

        also: items that come along in any case, in passes of their own where lengths differ. With
        packing (a runtime that pads nothing): the oldest items, up to true tokens. Without: the
        block of the optimal partition of the window that holds `first`.
        """
        if first.solo:
            chosen = [first]
        else:
            beside = [item for item in also if item is not first and not item.solo]
            for item in beside:
                budget_tokens -= padded_tokens(item)
            if packing:
                chosen = self._oldest_with(first, budget_tokens)
            else:
                chosen = self._block_of(first, budget_tokens, launch_tokens)
            chosen[1:1] = [item for item in beside if item not in chosen]
        chosen = _within(chosen)
        self._charge(chosen)
        self.remove([item.id for item in chosen])
        return chosen

    def _charge(self, chosen: Iterable[Item]) -> None:
        """What goes now counts for its tenants, and for the requests of each."""
        of_tenants: dict[str, int] = {}
        of_requests: dict[str, dict[str, int]] = {}
        for item in chosen:
            of_tenants[item.tenant] = of_tenants.get(item.tenant, 0) + item.tokens
            requests = of_requests.setdefault(item.tenant, {})
            requests[item.request] = requests.get(item.request, 0) + item.tokens
        self._shares.serve(of_tenants)
        for tenant, requests in of_requests.items():
            self._tenants[tenant].shares.serve(requests)

    def _oldest_with(self, first: Item, budget_tokens: int) -> list[Item]:
        chosen, tokens = [first], first.tokens
        for item in self._items.values():
            if item is first or item.solo:
                continue
            if tokens + item.tokens > budget_tokens:
                break
            chosen.append(item)
            tokens += item.tokens
        return chosen

    def _block_of(self, first: Item, budget_tokens: int, launch_tokens: float) -> list[Item]:
        at = first.longest_tokens
        if at * self._sequences[at] >= budget_tokens:
            return self._fill(first, [at], budget_tokens)  # full without any padding
        # A length that fills blocks alone is a wall: nothing gains by padding across it.
        lengths: list[int] = []
        for length in sorted(self._by_length):
            if length * self._sequences[length] >= budget_tokens:
                if length > at:
                    break
                lengths = []
            else:
                lengths.append(length)
        sizes = [(length, self._sequences[length]) for length in lengths]
        for start, end in _blocks(sizes, budget_tokens, launch_tokens):
            if sizes[start][0] <= at <= sizes[end - 1][0]:
                return self._fill(first, lengths[start:end], budget_tokens)
        return [first]

    def _fill(self, first: Item, lengths: Sequence[int], budget_tokens: int) -> list[Item]:
        """`first`, then the items of these lengths, oldest first in each, within the budget."""
        chosen, count = [first], len(first.lengths_tokens)
        longest = lengths[-1]
        for length in lengths:
            for item in self._by_length[length].values():
                if item is first or item.solo:
                    continue
                if longest * (count + len(item.lengths_tokens)) > budget_tokens:
                    return chosen
                chosen.append(item)
                count += len(item.lengths_tokens)
        return chosen


def _within(chosen: list[Item]) -> list[Item]:
    """The first items that go into one message to a runtime; the first of all always does."""
    size_bytes = chosen[0].size_bytes
    for count, item in enumerate(chosen[1:], start=1):
        size_bytes += item.size_bytes
        if size_bytes > MAX_BATCH_BYTES:
            return chosen[:count]
    return chosen
