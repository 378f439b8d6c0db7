"""The batch formers that others use, behind the scheduler's interface, to be compared with it.

Owns three of them, as plain as they are in the field. They know no lanes, shares or deadlines: the
line with the oldest head is next. Does not own their place in a comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from shoal.core.cost import Work
from shoal.core.policy import Where
from shoal.core.types import Batch, Item

Baseline = Literal["fifo32", "window64", "buckets"]

FIFO_ITEMS = 32
WINDOW_ITEMS = 64
WINDOW_S = 0.010
BUCKET_TOKENS = 1024
_BUCKETS = (16, 32, 64, 128, 256, 512, 1 << 30)


class BaselinePolicy:
    """One of three.

    fifo32: the oldest 32 sequences of a model, padded to the longest, as one pass.
    window64: waits 10 ms after the first arrival, or for 64, then the oldest, as one padded pass.
    buckets: the oldest of the head's length bucket (powers of two), at most 1,024 padded tokens.
    """

    def __init__(self, kind: Baseline, *, max_items: int) -> None:
        self._kind = kind
        self._max_items = max_items
        self._waiting: dict[str, dict[str, Item]] = {}

    def add(self, item: Item, now: float) -> bool:  # noqa: ARG002 - the protocol's signature
        """Takes an item in."""
        line = self._waiting.setdefault(item.model, {})
        if len(line) >= self._max_items or item.id in line:
            return False
        line[item.id] = item
        return True

    def remove(self, item_ids: Iterable[str]) -> list[Item]:
        """Takes items out."""
        wanted = list(item_ids)
        return [line.pop(i) for line in self._waiting.values() for i in wanted if i in line]

    def expire(self, now: float, where: Where) -> list[Item]:  # noqa: ARG002
        """Takes out what is past its deadline."""
        items = [item for line in self._waiting.values() for item in line.values()]
        return self.remove(item.id for item in items if item.deadline_s <= now)

    def deadline(self, now: float) -> float | None:  # noqa: ARG002
        """When the first window closes."""
        if self._kind != "window64":
            return None
        heads = [next(iter(line.values())) for line in self._waiting.values() if line]
        return min((head.arrived_s + WINDOW_S for head in heads), default=None)

    def next_batch(
        self,
        now: float,
        free_devices: int,  # noqa: ARG002
        where: Where,
    ) -> Batch | None:
        """The batch of the ready line with the oldest head."""
        lines = [
            line
            for model, line in self._waiting.items()
            if line and where(model) == "free" and self._ready(line, now)
        ]
        if not lines:
            return None
        line = min(lines, key=lambda one: next(iter(one.values())).arrived_s)
        items = list(line.values())
        chosen = {
            "fifo32": lambda: _up_to(items, FIFO_ITEMS),
            "window64": lambda: _up_to(items, WINDOW_ITEMS),
            "buckets": lambda: _bucket(items),
        }[self._kind]()
        for item in chosen:
            del line[item.id]
        lengths = [n for item in chosen for n in item.lengths_tokens]
        head = chosen[0]
        return Batch(head.model, head.lane, tuple(chosen), Work.of_blocks([lengths]), 0.0, 0)

    def _ready(self, line: dict[str, Item], now: float) -> bool:
        if self._kind != "window64":
            return True
        count = sum(len(item.lengths_tokens) for item in line.values())
        return count >= WINDOW_ITEMS or now >= next(iter(line.values())).arrived_s + WINDOW_S

    def finished(
        self, batch: Batch, took_s: float | None, now: float, *, learn: bool = True
    ) -> None:
        """Nothing is learnt."""


def _up_to(items: Sequence[Item], most: int) -> list[Item]:
    """The first items with at most `most` sequences in all; at least one item."""
    chosen: list[Item] = []
    count = 0
    for item in items:
        count += len(item.lengths_tokens)
        if chosen and count > most:
            break
        chosen.append(item)
    return chosen


def _bucket(items: Sequence[Item]) -> list[Item]:
    """The oldest items whose longest sequence is in the head's bucket."""
    top = next(b for b in _BUCKETS if items[0].longest_tokens <= b)
    below = max((b for b in _BUCKETS if b < top), default=0)
    chosen: list[Item] = []
    count = 0
    for item in items:
        if not below < item.longest_tokens <= top:
            continue
        count += len(item.lengths_tokens)
        if chosen and count * top > BUCKET_TOKENS:
            break
        chosen.append(item)
    return chosen
