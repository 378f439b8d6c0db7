"""How much work is before a new job, and whether the job can still be in time.

Owns the count of useful tokens and items that this gateway waits for, by lane and model (exact:
counted at submit and at each item's end), what other gateways last said of theirs, the step from
tokens to device seconds, and the refusal. Does not own the bound (`shoal.core.admission`) or the
workers' word on their speed (`fleet`).

A line is a (lane, model), as in the queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shoal.catalog.schema import Entry, Profile
from shoal.catalog.snapshot import Snapshot
from shoal.clock import monotonic
from shoal.core.admission import FleetLoad, ahead_s, needed_s, one_by_one_s, refuse, wait_s
from shoal.core.lanes import LaneRule
from shoal.core.types import Lane
from shoal.errors import Overloaded, QueueUnavailable
from shoal.gateway.fleet import Fleet
from shoal.queue.interface import Queue
from shoal.wire.envelope import Backlog, UnreadableMessage, decode_backlog, encode

log = logging.getLogger(__name__)

BEAT_S = 1.0
SILENT_S = 5.0
MAX_GATEWAYS = 1_000
LEAST_RETRY_S = 1.0
LEAST_ITEM_TOKENS = 64
ITEM_QUANTA = 0.25
WINDOW_QUANTA = 3.0
WINDOW_TEXTS = 2.0
LEAST_TEXTS = 4
# A full line has room as soon as a batch ends, but others wait for it too.
_FULL_LINE_SHARE = 0.1

Line = tuple[Lane, str]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _Said:
    """What another gateway waits for, and when it said so."""

    tokens: Mapping[Line, int]
    items: Mapping[str, int]
    heard_s: float


class BacklogBook:
    """Tokens that wait, by line. `run` tells the other gateways.

    name: of this gateway, unlike any other's. admission: False lets every job in. clock: seconds,
    monotonic.
    """

    def __init__(
        self,
        fleet: Fleet,
        catalog: Callable[[], Snapshot],
        lanes: tuple[LaneRule, ...],
        *,
        name: str,
        admission: bool = True,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._fleet = fleet
        self._catalog = catalog
        self._lanes = {rule.name: rule for rule in lanes}
        self._lane_weights = sum(rule.weight for rule in lanes)
        self._shortest_s = min(rule.quantum_s for rule in lanes)
        self._name = name
        self._admission = admission
        self._clock = clock
        self._own: dict[Line, int] = {}
        self._all: dict[Line, int] = {}
        self._own_items: dict[str, int] = {}
        self._all_items: dict[str, int] = {}
        self._others: dict[str, _Said] = {}
        # Device seconds of a token, and of all that waits: for one short sum per request. Made
        # anew from `_all` when the fleet has news, so that rounding does not add up.
        self._prices_s: dict[str, float] = {}
        self._total_s = 0.0
        self._news = fleet.news

    # --- counting

    def add(self, lane: Lane, model: str, tokens: int, items: int) -> None:
        """Counts what is submitted, or, below zero, what is done or wanted no more."""
        if tokens:
            line = (lane, model)
            _count(self._own, line, tokens)
            self._count_all(line, tokens)
        _count(self._own_items, model, items)
        _count(self._all_items, model, items)

    def _count_all(self, line: Line, tokens: int) -> None:
        _count(self._all, line, tokens)
        self._total_s += tokens * self._token_s(line[1])

    def on_backlog(self, data: bytes) -> None:
        """Takes in what another gateway says."""
        try:
            said = decode_backlog(data)
        except UnreadableMessage as error:
            log.debug("backlog: %s", error)
            return
        if said.gateway == self._name:
            return
        tokens = {
            (lane, model): n
            for lane, models in said.tokens.items()
            if lane in self._lanes
            for model, n in models.items()
            if n > 0
        }
        self._forget(said.gateway)
        if len(self._others) >= MAX_GATEWAYS:
            self._forget(next(iter(self._others)))
        items = {model: n for model, n in said.items.items() if n > 0}
        self._others[said.gateway] = _Said(tokens, items, self._clock())
        for line, n in tokens.items():
            self._count_all(line, n)
        for model, n in items.items():
            _count(self._all_items, model, n)

    def _forget(self, gateway: str) -> None:
        said = self._others.pop(gateway, None)
        if said is not None:
            for line, n in said.tokens.items():
                self._count_all(line, -n)
            for model, n in said.items.items():
                _count(self._all_items, model, -n)

    def _refresh(self) -> None:
        """Forgets gateways that say nothing any more, and what the fleet knows better by now."""
        while self._others:
            gateway, said = next(iter(self._others.items()))
            if said.heard_s >= self._clock() - SILENT_S:
                break  # the oldest word is the first
            self._forget(gateway)
        if self._fleet.news != self._news:
            self._news = self._fleet.news
            self._prices_s.clear()
            self._total_s = sum(n * self._token_s(model) for (_, model), n in self._all.items())

    def message(self) -> Backlog:
        """What this gateway tells the others."""
        tokens: dict[Lane, dict[str, int]] = {}
        for (lane, model), n in self._own.items():
            tokens.setdefault(lane, {})[model] = n
        return Backlog(self._name, tokens, dict(self._own_items))

    async def run(self, queue: Queue) -> None:
        """Tells the other gateways each second, until it is cancelled."""
        while True:
            try:
                await queue.tell("backlog", encode(self.message()))
            except QueueUnavailable as error:
                log.debug("backlog: %s", error)
            await asyncio.sleep(BEAT_S)

    # --- seconds

    def admit(self, entry: Entry, lane: Lane, tokens: Sequence[int], time_s: float) -> None:
        """Raises `Overloaded` when a job could not be done in `time_s`.

        tokens: of each of its items. Nothing is refused while nothing waits, or while no worker is
        known: nothing is known of the fleet's speed then, and one may be on its way. Nor is a text
        for which a slot is free: it waits for nobody.
        """
        if not self._admission or not self._all:
            return
        devices = self._fleet.devices
        if not devices:
            return
        at_once = self._fleet.at_once(entry.key) if entry.generates else 0
        if self._all_items.get(entry.key, 0) + len(tokens) <= at_once:
            return
        self._refresh()
        token_s = self._token_s(entry.key)
        # A text has its slot's share of a device: it takes as long as texts in all slots.
        cost_s = (sum(tokens) + max(tokens) * max(0, at_once - 1)) * token_s
        # Nearly always there is time even behind everything: two quick looks before the exact one.
        if one_by_one_s(self._total_s, cost_s) <= time_s:
            return
        rule = self._lanes[lane]
        quantum_s = max(rule.quantum_s, self._fleet.most_full_s)
        worst = FleetLoad(self._total_s, devices, len(self._all) + 1, quantum_s)
        if needed_s(worst, cost_s) <= time_s:
            return
        load = self._load(rule, entry.key, sum(tokens) * token_s, devices)
        after_s = refuse(load, cost_s, time_s)
        if after_s is not None:
            raise Overloaded(
                f"the answer would take up to {needed_s(load, cost_s):.1f} s, with "
                f"{load.backlog_s:.1f} s of device time before it (devices: {devices}), and "
                f"its deadline is in {max(0.0, time_s):.1f} s",
                retry_after_s=after_s,
            )

    def window(self, line: Line) -> float:
        """How much of this gateway's work may lie in a line: what keeps the devices busy.

        In useful tokens, of generators in texts. A quantum that runs and two to choose from; that
        is less than workers hold, so what comes besides is pulled at once. The gateways that have
        work there share it.
        """
        lane, model = line
        entry = self._catalog().get(model)
        sharing = 1 + sum(line in said.tokens for said in self._others.values())
        if entry is not None and entry.generates:
            return WINDOW_TEXTS * max(LEAST_TEXTS, self._fleet.at_once(model)) / sharing
        quantum_s = self._quantum_s(self._lanes[lane], [model])
        seconds = WINDOW_QUANTA * quantum_s * max(1, self._fleet.devices)
        return seconds / self._token_s(model) / sharing

    def item_tokens(self, model: str) -> int:
        """Useful tokens of an item: they run within a part of the shortest quantum of all lanes.

        Larger jobs are cut into items of this size, whatever their lane: an item cannot be cut any
        more once it is queued, and a long one would hold a device that short work waits for.
        """
        self._refresh()
        return max(LEAST_ITEM_TOKENS, int(ITEM_QUANTA * self._shortest_s / self._token_s(model)))

    def retry_s(self, model: str, lane: Lane, tokens: int) -> float:
        """When a full line should have room for a job of so many tokens."""
        waiting = max(tokens, _FULL_LINE_SHARE * self._all.get((lane, model), 0))
        devices = max(1, self._fleet.devices)
        return max(LEAST_RETRY_S, waiting * self._token_s(model) / devices)

    def backlog_s(self, lane: Lane) -> float:
        """Device seconds of what waits in a lane."""
        self._refresh()
        lines = ((line[1], n) for line, n in self._all.items() if line[0] == lane)
        return sum(n * self._token_s(model) for model, n in lines)

    def wait_bound_s(self, lane: Lane) -> float:
        """The longest that new work in a lane is expected to wait, whatever its model."""
        rule = self._lanes[lane]
        in_lane_s = self.backlog_s(lane) * self._lane_weights / rule.weight
        ahead = min(sum(self.backlog_s(name) for name in self._lanes), in_lane_s)
        models = {line[1] for line in self._all}
        quantum_s = self._quantum_s(rule, models)
        return wait_s(FleetLoad(ahead, self._fleet.devices, len(models) + 1, quantum_s))

    def _quantum_s(self, rule: LaneRule, models: Iterable[str]) -> float:
        """The longest batch of a lane: its quantum, or what a device needs for its full rate."""
        return max(rule.quantum_s, *(self._fleet.rates(model).full_s for model in models), 0.0)

    def _load(self, rule: LaneRule, model: str, cost_s: float, devices: int) -> FleetLoad:
        """What is before a job: all that waits, or what a fair share lets go first if less."""
        models = {model}
        total_s = lane_s = line_s = 0.0
        own_weight = weights = self._weight(model)
        for line, tokens in self._all.items():
            seconds = tokens * self._token_s(line[1])
            total_s += seconds
            models.add(line[1])
            if line[0] != rule.name:
                continue
            lane_s += seconds
            if line[1] == model:
                line_s = seconds
            else:
                weights += self._weight(line[1])
        ahead = ahead_s(
            total_s,
            lane_s,
            line_s,
            cost_s,
            lane_share=rule.weight / self._lane_weights,
            line_share=own_weight / weights,
        )
        return FleetLoad(ahead, devices, len(models), self._quantum_s(rule, models))

    def _token_s(self, model: str) -> float:
        """Device seconds of a token: as workers have seen it, else the profile's guess."""
        price_s = self._prices_s.get(model)
        if price_s is None:
            price_s = self._fleet.rates(model).token_s
            if price_s <= 0:
                entry = self._catalog().get(model)
                price_s = 1.0 / (Profile() if entry is None else entry.profile).tokens_per_s
            self._prices_s[model] = price_s
        return price_s

    def _weight(self, model: str) -> float:
        entry = self._catalog().get(model)
        return 1.0 if entry is None else entry.weight


def _count(counts: dict[Key, int], key: Key, n: int) -> None:
    left = counts.get(key, 0) + n
    if left > 0:
        counts[key] = left
    else:
        counts.pop(key, None)
