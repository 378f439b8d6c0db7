"""One (model, lane) as the scheduler sees it.

Owns how a model is scheduled, a line's window and account, and the work of its items. Does not own
whose turn it is (`schedule`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.core.batching import Window, partition
from shoal.core.cost import CostModel, Work
from shoal.core.lanes import LaneRule
from shoal.core.turns import Account
from shoal.core.types import Item


@dataclass(frozen=True, slots=True)
class ModelRule:
    """How one model is scheduled.

    weight: its share of a lane's device time. packing: its runtime pads nothing.
    block_tokens: the most padded tokens of one forward pass. max_items: the window's bound.
    max_batch_tokens: no batch is larger, whatever the quantum allows.
    """

    model: str
    weight: float
    packing: bool
    block_tokens: int
    max_items: int
    max_batch_tokens: int


class Line:
    """One (model, lane): its window, and its account.

    late: what the cost model takes for hopeless. passed_over: the last batch was urgent and had no
    room for the head.
    """

    __slots__ = ("account", "cost", "lane", "late", "passed_over", "rule", "window")

    def __init__(self, rule: ModelRule, lane: LaneRule, cost: CostModel) -> None:
        self.rule = rule
        self.lane = lane
        self.cost = cost
        self.window = Window(rule.model, lane.name, max_items=rule.max_items)
        self.account = Account(rule.weight)
        self.late: dict[str, Item] = {}
        self.passed_over = False

    @property
    def head(self) -> Item:
        """The item that goes next; the line must not be empty."""
        head = self.window.head
        if head is None:
            raise ValueError("an empty line has no head")
        return head

    def alone(self, item: Item) -> Work:
        """The work of an item that runs alone."""
        if self.rule.packing:
            return Work.of_packed(item.lengths_tokens)
        return padded_work(item.lengths_tokens, self.rule.block_tokens)


def padded_work(lengths_tokens: Sequence[int], block_tokens: int) -> Work:
    """The work of sequences that run in padded passes of so many tokens at most."""
    groups = partition(lengths_tokens, block_tokens)
    return Work.of_blocks([[lengths_tokens[i] for i in group] for group in groups])
