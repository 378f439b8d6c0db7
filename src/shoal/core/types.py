"""The nouns that policies speak of.

Owns Item (the unit that is queued, batched and answered), Batch, and the Task and Lane names.
Does not own the wire form of any of them (`shoal.wire`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Task = Literal["encode", "score", "classify"]
TASKS: tuple[Task, ...] = ("encode", "score", "classify")

Lane = Literal["interactive", "bulk"]
LANES: tuple[Lane, ...] = ("interactive", "bulk")


@dataclass(frozen=True, slots=True)
class Item:
    """One queued unit of work, as a policy sees it.

    `lengths_tokens` has the exact length of every sequence that the item needs run (a pair head
    that encodes a query and n documents has n + 1). `deadline_s` is wall-clock seconds.
    """

    id: str
    model: str
    lane: Lane
    lengths_tokens: tuple[int, ...]
    deadline_s: float
    arrived_s: float

    @property
    def longest_tokens(self) -> int:
        """The length that the item's sequences are padded to when it runs alone."""
        return max(self.lengths_tokens, default=0)

    @property
    def tokens(self) -> int:
        """Useful tokens: the sum of the true lengths."""
        return sum(self.lengths_tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """Items of one model that run together. `padded_tokens` is an upper bound of their cost."""

    model: str
    items: tuple[Item, ...]
    padded_tokens: int
