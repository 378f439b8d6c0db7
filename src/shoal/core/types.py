"""The nouns that policies speak of.

Owns Item (the unit that is queued, batched and answered), Batch, and the names of tasks. Does not
own the wire form of any of them (`shoal.wire`) or the lanes (`lanes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.core.cost import Work

Task = Literal["encode", "score", "classify", "extract", "transcribe", "generate"]
TASKS: tuple[Task, ...] = ("encode", "score", "classify", "extract", "transcribe", "generate")
TEXT_TASKS: tuple[Task, ...] = ("encode", "score", "classify", "extract")

Lane = str


@dataclass(frozen=True, slots=True)
class Item:
    """One queued unit of work, as a policy sees it.

    `lengths_tokens` has the exact length of every sequence that the item needs run (a pair head
    that encodes a query and n documents has n + 1). `deadline_s` and `arrived_s` are on the same
    clock as every `now` that a policy is given. solo: it was in a batch that took its process down,
    and runs alone now, so that the culprit harms nobody else. request: the call that it is a part
    of; the calls of a tenant take turns. size_bytes: of what its runtime gets.
    """

    id: str
    model: str
    lane: Lane
    lengths_tokens: tuple[int, ...]
    deadline_s: float
    arrived_s: float
    tenant: str = ""
    solo: bool = False
    request: str = ""
    size_bytes: int = 0

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
    """Items of one model that run together on one device.

    work: what the device will compute. expected_s: device seconds by the cost model.
    block_tokens: the most padded tokens of one forward pass; the runtime cuts the batch into
    passes of similar length within it. 0: the whole batch is one padded pass.
    """

    model: str
    lane: Lane
    items: tuple[Item, ...]
    work: Work
    expected_s: float
    block_tokens: int

    @property
    def tokens(self) -> int:
        """Useful tokens."""
        return sum(item.tokens for item in self.items)
