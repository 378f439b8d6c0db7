"""Which line's batch a free device runs next.

One step of the scheduler reads: who may run, who is urgent, else whose turn is it, form the batch,
charge it. Time is an argument; the worker and a simulator drive the very same object.

- **Drop** what cannot be done by its deadline even if it ran alone and now (`expire`).
- **Urgent first**: a line whose most urgent item would miss its deadline if it waited for one more
  quantum goes first, earliest deadline first. That lends the line device time; one that is
  `MAX_DEBT_S` ahead of its fair share is no longer urgent, so deadlines cannot starve anyone.
- **Else fair** by device seconds over weight, at two levels: lanes, then models of a lane
  (start-time fair queueing, Goyal et al. 1996; within a model, tenants take turns in the window).
  A line that becomes active starts level with the least served, so nobody saves up. Waiting counts:
  `age_s` at the head of a line is worth one quantum.
- **Else useful**: among models within one quantum of the least served, the one whose batch has the
  best share of useful time.
- **Work conserving**: a device is never left idle while a line may run.
- **Long beside short**: while lanes of short quanta are active, longer ones run batches of the
  shortest quantum only, on all devices but one. So does an item that alone takes many quanta (a
  page to be read, a minute of speech), whatever its lane: it cannot be cut.

Owns the choice, the budget of a batch and the charges. Does not own where models are (`may_run`),
pulling, or the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from shoal.core.batching import Window, partition
from shoal.core.cost import CostModel, Work
from shoal.core.lanes import LaneRule
from shoal.core.types import Batch, Item, Lane

MAX_DEBT_S = 2.0
LONG_QUANTA = 4.0
ACTIVE_S = 1.0
Mode = Literal["fair", "oldest"]


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


class Policy(Protocol):
    """What drives devices: the scheduler, and the baselines that it is compared with."""

    def add(self, item: Item, now: float) -> bool:
        """Takes an item in; False when its window is full."""

    def remove(self, item_ids: Iterable[str]) -> list[Item]:
        """Takes items out that nobody waits for."""

    def expire(self, now: float) -> list[Item]:
        """Takes out what cannot be done in time any more."""

    def next_batch(
        self, now: float, free_devices: int, may_run: Callable[[str], bool]
    ) -> Batch | None:
        """The batch for one of the devices that are free; None when there is none now."""

    def deadline(self, now: float) -> float | None:
        """When `next_batch` may say something else although nothing was added; None for never."""

    def finished(
        self, batch: Batch, took_s: float | None, now: float, *, learn: bool = True
    ) -> None:
        """A batch has left its device after `took_s` device seconds (None: it was lost).

        learn: that time says something of what such a batch costs.
        """


class _Line:
    """One (model, lane): its window, and its account in device seconds over weight."""

    __slots__ = ("account_s", "cost", "lane", "rule", "window")

    def __init__(self, rule: ModelRule, lane: LaneRule, cost: CostModel) -> None:
        self.rule = rule
        self.lane = lane
        self.cost = cost
        self.window = Window(rule.model, lane.name, max_items=rule.max_items)
        self.account_s = 0.0

    def alone(self, item: Item) -> Work:
        """The work of an item that runs alone."""
        if self.rule.packing:
            return Work.of_packed(item.lengths_tokens)
        return _padded_work(item.lengths_tokens, self.rule.block_tokens)


class Scheduler:
    """The policy that Shoal's workers run. See the module for its rules.

    mode `oldest` serves the line with the oldest head, the reference for the waiting bound
    start <= q + ceil((M - 1) / W) * q of M models on W devices with batches of at most q seconds.
    """

    def __init__(
        self,
        lanes: Sequence[LaneRule],
        *,
        devices: int,
        mode: Mode = "fair",
        urgency: bool = True,
    ) -> None:
        self._lanes = {rule.name: rule for rule in lanes}
        self._shortest_s = min(rule.quantum_s for rule in lanes)
        self._long_s = LONG_QUANTA * self._shortest_s
        self._devices = devices
        self._mode = mode
        self._urgency = urgency
        self._lines: dict[tuple[str, Lane], _Line] = {}
        self._lane_account_s = dict.fromkeys(self._lanes, 0.0)
        self._short_seen_s = float("-inf")
        self._long_running: dict[int, Batch] = {}
        self.urgent_batches = 0
        self.debt_s = 0.0

    def add_model(self, rule: ModelRule, cost: CostModel) -> None:
        """Makes the lines of a model; `cost` goes on learning wherever it is shared."""
        for lane in self._lanes.values():
            self._lines[(rule.model, lane.name)] = _Line(rule, lane, cost)

    def change_model(self, rule: ModelRule) -> None:
        """Another weight or other bounds for a model that is here; what waits goes on waiting."""
        for lane in self._lanes:
            line = self._lines[(rule.model, lane)]
            line.rule = rule
            line.window.max_items = rule.max_items

    def packs(self, model: str) -> bool:
        """Whether a model's runtime pads nothing."""
        return any(self._lines[(model, lane)].rule.packing for lane in self._lanes)

    def remove_model(self, model: str) -> None:
        """Forgets a model of which nothing waits or runs."""
        for lane in self._lanes:
            self._lines.pop((model, lane), None)

    def window(self, model: str, lane: Lane) -> Window:
        """The window of a line."""
        return self._lines[(model, lane)].window

    def add(self, item: Item, now: float) -> bool:
        """Takes an item in."""
        line = self._lines[(item.model, item.lane)]
        idle = not len(line.window)
        alone_s = line.cost.predict_s(line.alone(item))
        if not line.window.add(item, item.deadline_s - alone_s):
            return False
        if idle:
            self._wake(line)
        if self._is_short(line) and alone_s <= self._long_s:
            self._short_seen_s = now
        return True

    def remove(self, item_ids: Iterable[str]) -> list[Item]:
        """Takes items out."""
        wanted = list(item_ids)
        return [item for line in self._lines.values() for item in line.window.remove(wanted)]

    def expire(self, now: float) -> list[Item]:
        """Takes out what cannot be done in time any more."""
        return [item for line in self._lines.values() for item in line.window.expire(now)]

    def deadline(self, now: float) -> float | None:  # noqa: ARG002 - the protocol's signature
        """The next moment at which an item becomes hopeless."""
        starts = [u[0] for line in self._lines.values() if (u := line.window.most_urgent())]
        return min(starts, default=None)

    def next_batch(
        self, now: float, free_devices: int, may_run: Callable[[str], bool]
    ) -> Batch | None:
        """One step; see the module."""
        lines = [n for n in self._lines.values() if len(n.window) and may_run(n.rule.model)]
        if self._long_is_capped(now):
            lines = [line for line in lines if not self._is_long(line)]
        if not lines:
            return None
        line, first = self._urgent(lines, now) or self._in_turn(lines, now)
        batch = self._form(line, first, now, free_devices)
        self._charge(line, batch.expected_s)
        if self._is_long_batch(line, batch):
            self._long_running[id(batch)] = batch
        return batch

    def finished(
        self,
        batch: Batch,
        took_s: float | None,
        now: float,  # noqa: ARG002 - the protocol's signature
        *,
        learn: bool = True,
    ) -> None:
        """Sets the account right, and learns what the batch cost."""
        line = self._lines[(batch.model, batch.lane)]
        self._long_running.pop(id(batch), None)
        if took_s is None:
            self._charge(line, -batch.expected_s)
            return
        self._charge(line, took_s - batch.expected_s)
        if learn:
            line.cost.observe(batch.work, took_s)

    def budget_tokens(self, model: str, lane: Lane) -> int:
        """The padded tokens of a full batch of a line, for whoever decides how much to pull."""
        line = self._lines[(model, lane)]
        return self._budget(line, line.lane.quantum_s)

    # --- who is next

    def _is_short(self, line: _Line) -> bool:
        return line.lane.quantum_s <= self._shortest_s

    def _short_is_active(self, now: float) -> bool:
        """Whether short work is here or was here a moment ago."""
        return now - self._short_seen_s < ACTIVE_S or any(
            len(line.window) and not self._is_long(line) for line in self._lines.values()
        )

    def _is_long(self, line: _Line) -> bool:
        """Whether the line's next batch is of a longer lane, or an item that cannot be cut."""
        return not self._is_short(line) or (
            len(line.window) > 0 and line.cost.predict_s(line.alone(_head(line))) > self._long_s
        )

    def _is_long_batch(self, line: _Line, batch: Batch) -> bool:
        return not self._is_short(line) or batch.expected_s > self._long_s

    def _long_is_capped(self, now: float) -> bool:
        capped = len(self._long_running) >= max(1, self._devices - 1)
        return capped and self._short_is_active(now)

    def _urgent(self, lines: Sequence[_Line], now: float) -> tuple[_Line, Item] | None:
        """The line with the earliest deadline among those that cannot wait a quantum more."""
        if self._mode == "oldest" or not self._urgency:
            return None
        least_s = min(line.account_s for line in lines)
        found: list[tuple[float, int, _Line, Item]] = []
        for n, line in enumerate(lines):
            urgent = line.window.most_urgent()
            if urgent is None or line.account_s - least_s > MAX_DEBT_S:
                continue
            margin_s = line.cost.bound_s(line.alone(urgent[1])) + line.lane.quantum_s
            if urgent[1].deadline_s - margin_s <= now:
                found.append((urgent[1].deadline_s, n, line, urgent[1]))
        if not found:
            return None
        _, _, line, item = min(found)
        self.urgent_batches += 1
        self.debt_s = max(0.0, line.account_s - least_s)
        return line, item

    def _in_turn(self, lines: Sequence[_Line], now: float) -> tuple[_Line, Item]:
        if self._mode == "oldest":
            line = min(lines, key=lambda one: _head(one).arrived_s)
            return line, _head(line)
        lane = min(
            {line.lane.name for line in lines},
            key=lambda name: self._lane_turn_s(name, lines, now),
        )
        inside = [line for line in lines if line.lane.name == lane]
        turns = {id(line): self._turn_s(line, now) for line in inside}
        near_s = min(turns.values()) + inside[0].lane.quantum_s
        level = [line for line in inside if turns[id(line)] <= near_s]
        line = max(level, key=lambda one: (round(self._useful_share(one), 2), -turns[id(one)]))
        return line, _head(line)

    def _lane_turn_s(self, lane: Lane, lines: Iterable[_Line], now: float) -> float:
        rule = self._lanes[lane]
        waited_s = max(now - _head(line).arrived_s for line in lines if line.lane.name == lane)
        return self._lane_account_s[lane] - waited_s / rule.age_s * rule.quantum_s

    def _turn_s(self, line: _Line, now: float) -> float:
        waited_s = now - _head(line).arrived_s
        return line.account_s - waited_s / line.lane.age_s * line.lane.quantum_s

    def _useful_share(self, line: _Line) -> float:
        """The share of a batch's device time that its tokens need, at the slope of a full one."""
        state = line.cost.state()
        tokens = min(line.window.tokens, self._budget(line, line.lane.quantum_s))
        useful_s = state.token_s * tokens
        return useful_s / max(state.floor_s, state.launch_s + useful_s)

    # --- what runs

    def _budget(self, line: _Line, allowed_s: float) -> int:
        window = line.window
        typical = max(1, window.tokens // max(1, len(window))) if len(window) else 64
        tokens = line.cost.budget_tokens(allowed_s, typical)
        return max(1, min(tokens, line.rule.max_batch_tokens))

    def _form(self, line: _Line, first: Item, now: float, free_devices: int) -> Batch:
        """The batch around `first`: within the quantum, and shared with other free devices."""
        allowed_s = line.lane.quantum_s
        if not self._is_short(line) and self._short_is_active(now):
            allowed_s = self._shortest_s
        budget = self._budget(line, allowed_s)
        if free_devices > 1:
            budget = min(budget, -(-line.window.tokens // free_devices))
        budget = max(budget, first.longest_tokens * len(first.lengths_tokens))
        state, packing = line.cost.state(), line.rule.packing
        items = line.window.take(
            first,
            budget_tokens=budget,
            launch_tokens=state.launch_s / state.token_s,
            packing=packing,
        )
        lengths = [n for item in items for n in item.lengths_tokens]
        work = Work.of_packed(lengths) if packing else _padded_work(lengths, line.rule.block_tokens)
        return Batch(
            line.rule.model,
            line.lane.name,
            tuple(items),
            work,
            line.cost.predict_s(work),
            line.rule.block_tokens,
        )

    # --- accounts

    def _charge(self, line: _Line, device_s: float) -> None:
        line.account_s += device_s / line.rule.weight
        self._lane_account_s[line.lane.name] += device_s / line.lane.weight

    def _wake(self, line: _Line) -> None:
        """A line that becomes active starts level with the least served of the active ones."""
        lane = line.lane.name
        active = [n for n in self._lines.values() if len(n.window) and n is not line]
        others = [other.account_s for other in active if other.lane.name == lane]
        line.account_s = max(line.account_s, min(others, default=line.account_s))
        if not others:
            lanes = {other.lane.name for other in active}
            accounts = [self._lane_account_s[name] for name in lanes]
            own_s = self._lane_account_s[lane]
            self._lane_account_s[lane] = max(own_s, min(accounts, default=own_s))


def _head(line: _Line) -> Item:
    head = line.window.head
    if head is None:
        raise ValueError("an empty line has no head")
    return head


def _padded_work(lengths_tokens: Sequence[int], block_tokens: int) -> Work:
    groups = partition(lengths_tokens, block_tokens)
    return Work.of_blocks([[lengths_tokens[i] for i in group] for group in groups])
