"""Which line's batch a free device runs next.

One step of the scheduler reads: who may run, who is urgent, else whose turn is it, form the batch,
charge it. Time is an argument; the worker and a simulator drive the very same object.

- **Fair** by device seconds over weight, at two levels: lanes, then models of a lane (`turns`);
  within a model, tenants take turns in the window. Nobody saves up device time while it is idle, or
  nearly so, and nobody is charged for having been alone.
- **Urgent first**: a line whose most urgent item would miss its deadline if it waited for one more
  quantum goes first, earliest deadline first. That lends the line device time, as it lends its
  lane; one that is `MAX_DEBT_S` ahead of its lane's virtual time, or whose lane is as far ahead of
  that of the lanes, is no longer urgent, so deadlines cannot starve anyone. Inside the line the
  tenant whose turn it is has its head in the urgent batch, or in the next.
- **Useful**: among models within one quantum of the least served, the one whose batch has the best
  share of useful time.
- **A quantum that fits the device**: where a batch of the lane's quantum would be mostly launch (a
  slow device, a large model), a line's batches may take what reaches `shoal.core.cost.FULL` of the
  device's best rate by the learnt cost, up to `FIT_QUANTA` quanta.
- **Work conserving**: a device is never left idle while a line may run. What the cost model takes
  for hopeless goes last, and runs where nothing else can: predictions are tried, not believed.
  While all devices of its model are busy, it is dropped (`expire`).
- **Long beside short**: while lanes of short quanta are active, longer ones run batches of the
  shortest quantum only, on all devices but one. So does an item that alone takes many quanta (a
  page to be read, a minute of speech), whatever its lane: it cannot be cut. Work of a model that is
  on no device here is not active.

Owns the choice, the budget of a batch and the charges. Does not own where models are (`where`),
pulling, or the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from shoal.core.batching import Window, padded_tokens
from shoal.core.cost import CostModel, Work
from shoal.core.lanes import LaneRule
from shoal.core.line import Line, ModelRule, padded_work
from shoal.core.policy import Where
from shoal.core.turns import MAX_DEBT_S, Account, Turns
from shoal.core.types import Batch, Item, Lane

LONG_QUANTA = 4.0
FIT_QUANTA = 20.0
ACTIVE_S = 1.0
Mode = Literal["fair", "oldest"]


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
        self._devices = devices
        self._mode = mode
        self._urgency = urgency
        self._lines: dict[tuple[str, Lane], Line] = {}
        # Those that hold something: a step costs nothing for models that nobody asks for.
        self._busy: dict[tuple[str, Lane], Line] = {}
        self._lane_accounts = {rule.name: Account(rule.weight) for rule in lanes}
        self._lane_turns = Turns()
        self._line_turns = {rule.name: Turns() for rule in lanes}
        self._short_seen_s = float("-inf")
        self._long_running: dict[int, Batch] = {}
        self.urgent_batches = 0
        self.debt_s = 0.0

    def add_model(self, rule: ModelRule, cost: CostModel) -> None:
        """Makes the lines of a model; `cost` goes on learning wherever it is shared."""
        for lane in self._lanes.values():
            self._lines[(rule.model, lane.name)] = Line(rule, lane, cost)

    def change_model(self, rule: ModelRule) -> None:
        """Another weight or other bounds for a model that is here; what waits goes on waiting."""
        for lane in self._lanes:
            line = self._lines[(rule.model, lane)]
            line.rule = rule
            line.account.weight = rule.weight
            line.window.max_items = rule.max_items

    def packs(self, model: str) -> bool:
        """Whether a model's runtime pads nothing."""
        return any(self._lines[(model, lane)].rule.packing for lane in self._lanes)

    def remove_model(self, model: str) -> None:
        """Forgets a model of which nothing waits or runs."""
        for lane in self._lanes:
            self._lines.pop((model, lane), None)
            self._busy.pop((model, lane), None)

    def _holding(self) -> list[Line]:
        """The lines that hold something; those that do no more take no part in turns."""
        for key, line in list(self._busy.items()):
            if not len(line.window) and not line.late:
                del self._busy[key]
                line.account.here = False
        return list(self._busy.values())

    def window(self, model: str, lane: Lane) -> Window:
        """The window of a line."""
        return self._lines[(model, lane)].window

    def add(self, item: Item, now: float) -> bool:  # noqa: ARG002 - the protocol's signature
        """Takes an item in."""
        line = self._lines[(item.model, item.lane)]
        self._busy[(item.model, item.lane)] = line
        alone_s = line.cost.predict_s(line.alone(item))
        return item.id not in line.late and line.window.add(item, item.deadline_s - alone_s)

    def remove(self, item_ids: Iterable[str]) -> list[Item]:
        """Takes items out."""
        wanted = list(item_ids)
        lines = self._holding()
        gone = [item for line in lines for item in line.window.remove(wanted)]
        for line in lines:
            gone += [item for each in wanted if (item := line.late.pop(each, None)) is not None]
        return gone

    def expire(self, now: float, where: Where) -> list[Item]:
        """Takes out what is past its deadline, and what is hopeless while its devices are busy."""
        self._set_aside(now)
        gone: list[Item] = []
        for line in self._holding():
            if not line.late:
                continue
            busy = where(line.rule.model) == "busy"
            late = [item for item in line.late.values() if busy or item.deadline_s <= now]
            for item in late:
                del line.late[item.id]
            gone += late
        return gone

    def _set_aside(self, now: float) -> None:
        """Finds what cannot be done by its deadline, by what batches are thought to cost."""
        for line in self._holding():
            line.late.update((item.id, item) for item in line.window.expire(now))

    def deadline(self, now: float) -> float | None:  # noqa: ARG002 - the protocol's signature
        """The next moment at which an item becomes hopeless, or late."""
        lines = self._holding()
        moments = [u[0] for line in lines if (u := line.window.most_urgent())]
        moments += [item.deadline_s for line in lines for item in line.late.values()]
        return min(moments, default=None)

    def next_batch(self, now: float, free_devices: int, where: Where) -> Batch | None:
        """One step; see the module."""
        self._set_aside(now)
        return self._next(now, free_devices, where) or (
            self._next(now, free_devices, where) if self._try_late(now, where) else None
        )

    def _next(self, now: float, free_devices: int, where: Where) -> Batch | None:
        lines = self._able(now, where)
        if self._long_is_capped(now):
            lines = [line for line in lines if not self._is_long(line)]
        if not lines:
            return None
        self._lane_turns.step({n.lane.name: self._lane_account(n) for n in lines}.values())
        for lane in {line.lane.name for line in lines}:
            self._line_turns[lane].step(n.account for n in lines if n.lane.name == lane)
        line, first = self._urgent(lines, now) or self._in_turn(lines)
        batch = self._form(line, first, now, free_devices)
        self._charge(line, batch.expected_s)
        if self._is_long_batch(line, batch):
            self._long_running[id(batch)] = batch
        return batch

    def _try_late(self, now: float, where: Where) -> bool:
        """Lets an idle device try what was taken for hopeless; whether there is any."""
        for line in self._holding():
            tried = [item for item in line.late.values() if item.deadline_s > now]
            if not tried or where(line.rule.model) != "free":
                continue
            for item in tried:
                del line.late[item.id]
                line.window.add(item, item.deadline_s)
            return True
        return False

    def _able(self, now: float, where: Where) -> list[Line]:
        """The lines that may run on a free device; brings up to date who takes part in turns."""
        able = []
        waiting = set()
        for line in self._holding():
            place = where(line.rule.model) if len(line.window) else "absent"
            if place == "absent":
                line.account.here = False
                continue
            waiting.add(line.lane.name)
            if not self._is_long(line):
                self._short_seen_s = now
            self._line_turns[line.lane.name].wake(line.account)
            self._lane_turns.wake(self._lane_account(line))
            if place == "free":
                able.append(line)
        for name, account in self._lane_accounts.items():
            account.here = name in waiting
        return able

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
        return self._budget(line, self._quantum_s(line))

    def _quantum_s(self, line: Line, least_s: float | None = None) -> float:
        """The longest batch of a line: of its lane, or of `least_s`, and what fits the device."""
        quantum_s = line.lane.quantum_s if least_s is None else least_s
        return max(quantum_s, min(line.cost.full_s(), FIT_QUANTA * self._shortest_s))

    # --- who is next

    def _is_short(self, line: Line) -> bool:
        return line.lane.quantum_s <= self._shortest_s

    def _short_is_active(self, now: float) -> bool:
        """Whether short work is here or was here a moment ago."""
        return now - self._short_seen_s < ACTIVE_S

    def _is_long(self, line: Line) -> bool:
        """Whether the line's next batch is of a longer lane, or an item that cannot be cut."""
        if not self._is_short(line):
            return True
        if not len(line.window):
            return False
        return line.cost.predict_s(line.alone(line.head)) > LONG_QUANTA * self._quantum_s(line)

    def _is_long_batch(self, line: Line, batch: Batch) -> bool:
        return not self._is_short(line) or (batch.expected_s > LONG_QUANTA * self._quantum_s(line))

    def _long_is_capped(self, now: float) -> bool:
        capped = len(self._long_running) >= max(1, self._devices - 1)
        return capped and self._short_is_active(now)

    def _urgent(self, lines: Sequence[Line], now: float) -> tuple[Line, Item] | None:
        """The line with the earliest deadline among those that cannot wait a quantum more."""
        if self._mode == "oldest" or not self._urgency:
            return None
        found: list[tuple[float, int, Line, Item]] = []
        for n, line in enumerate(lines):
            urgent = line.window.most_urgent()
            if urgent is None or line.passed_over or self._debt_s(line) > MAX_DEBT_S:
                continue
            margin_s = line.cost.bound_s(line.alone(urgent[1])) + self._quantum_s(line)
            if urgent[1].deadline_s - margin_s <= now:
                found.append((urgent[1].deadline_s, n, line, urgent[1]))
        if not found:
            return None
        _, _, line, item = min(found)
        self.urgent_batches += 1
        self.debt_s = max(0.0, self._debt_s(line))
        return line, item

    def _debt_s(self, line: Line) -> float:
        """Device seconds that a line is ahead of its lane, or its lane of the others."""
        return max(
            self._line_turns[line.lane.name].debt_s(line.account),
            self._lane_turns.debt_s(self._lane_account(line)),
        )

    def _in_turn(self, lines: Sequence[Line]) -> tuple[Line, Item]:
        if self._mode == "oldest":
            line = min(lines, key=lambda one: one.head.arrived_s)
            return line, line.head
        lane = min(
            {line.lane.name for line in lines}, key=lambda name: self._lane_accounts[name].used_s
        )
        inside = [line for line in lines if line.lane.name == lane]
        least_s = min(line.account.used_s for line in inside)
        level = [
            line
            for line in inside
            if (line.account.used_s - least_s) * line.rule.weight <= self._quantum_s(line)
        ]
        line = max(level, key=lambda one: (round(self._useful_share(one), 2), -one.account.used_s))
        return line, line.head

    def _useful_share(self, line: Line) -> float:
        """The share of a batch's device time that its tokens need, at the slope of a full one."""
        state = line.cost.state()
        tokens = min(line.window.tokens, self._budget(line, self._quantum_s(line)))
        useful_s = state.token_s * tokens
        return useful_s / max(state.floor_s, state.launch_s + useful_s)

    # --- what runs

    def _budget(self, line: Line, allowed_s: float) -> int:
        window = line.window
        typical = max(1, window.tokens // max(1, len(window))) if len(window) else 64
        tokens = line.cost.budget_tokens(allowed_s, typical)
        return max(1, min(tokens, line.rule.max_batch_tokens))

    def _form(self, line: Line, first: Item, now: float, free_devices: int) -> Batch:
        """The batch around `first`: within the quantum, and shared with other free devices."""
        beside_short = not self._is_short(line) and self._short_is_active(now)
        allowed_s = self._quantum_s(line, self._shortest_s if beside_short else None)
        budget = self._budget(line, allowed_s)
        if free_devices > 1:
            budget = min(budget, -(-line.window.tokens // free_devices))
        state, packing = line.cost.state(), line.rule.packing
        head = line.head
        also = line.window.behind(budget // 2)
        if also:  # small calls beside a large one wait for this very batch to end: not much else
            budget = min(budget, max(budget // 4, 2 * sum(map(padded_tokens, also))))
        if head not in also and padded_tokens(head) + padded_tokens(first) <= budget:
            also = [head, *also]
        items = line.window.take(
            first,
            also=also,
            budget_tokens=max(budget, padded_tokens(first)),
            launch_tokens=state.launch_s / state.token_s,
            packing=packing,
        )
        line.passed_over = head not in items
        lengths = [n for item in items for n in item.lengths_tokens]
        work = Work.of_packed(lengths) if packing else padded_work(lengths, line.rule.block_tokens)
        return Batch(
            line.rule.model,
            line.lane.name,
            tuple(items),
            work,
            line.cost.predict_s(work),
            line.rule.block_tokens,
        )

    # --- accounts

    def _lane_account(self, line: Line) -> Account:
        return self._lane_accounts[line.lane.name]

    def _charge(self, line: Line, device_s: float) -> None:
        line.account.charge(device_s)
        self._lane_account(line).charge(device_s)
