"""What to load and what to evict now: the body that every residency policy shares.

Owns what is wanted and how strongly, on which device it goes, which copies make room, idle
timeouts, and the correction of memory that is over its budget. Does not own what a copy is worth
(`residency_rank`); carries nothing out.

A model that work waits for and that is nowhere is a *claim*. Where there is room it is loaded at
once. Where something must go, idle copies without work go first, the least worth first, and only
for a claim that is strong enough:

- it beats the copy: it is worth `hysteresis` times as much (rankings without: every claim does);
- it is mature: its items have waited as many item-seconds as the load costs (ski rental);
- it is urgent: its most urgent item must be loaded for now.

A copy with work of its own, or busy, goes once it has served a batch, for a mature claim only after
it has stayed for a while. A device begins no load while a copy that it has just loaded waits for
its first batch, and none that evicts until it has rested from its last load for as long as that
took (unless a deadline is at stake), so that loads never have most of its time. While a busy copy
must go it is closed: it gets no new batches. A mature claim that cannot be served yet holds the
memory, so that smaller ones do not take the room bit by bit; the claim that matured first is first.
So every claim that fits is served in bounded time, and no load is in vain.

Sizes that were not measured are doubted: for them alone, the last copy of a model that was used a
moment ago stays. The claim is loaded above the budget by at most a quarter of it instead, and what
it turns out to need decides what goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shoal.core.missed import Missed
from shoal.core.residency import Action, Close, Copy, Demand, Evict, Held, Load, Memory, kept
from shoal.core.residency_rank import Ranking

ACTIVE_S = 60.0
STAY_LOADS = 2.0
LEAST_STAY_S = 1.0
MOST_STAY_S = 30.0
URGENT_S = 0.05
# What a load in the place of another costs, in loads: its own, that of the copy which went for it
# and comes back, and the wait of all others while the device does both.
COST_LOADS = 3.0
OVERSHOOT_SHARE = 0.25


def stay_s(load_s: float) -> float:
    """How long a copy may stay, though others wait, after a load that took `load_s`."""
    return min(MOST_STAY_S, max(LEAST_STAY_S, STAY_LOADS * load_s))


def mature_s(demand: Demand, now: float) -> float:
    """When a claim has waited for what its load costs; in the past if it has already."""
    return now + (COST_LOADS * demand.load_s - demand.waited_s) / max(1, demand.waiting)


@dataclass(frozen=True, slots=True)
class Claim:
    """A copy that is wanted. worth: its own, per byte.

    needed: pinned, or fewer than `min_copies`. another: there are copies already.
    """

    demand: Demand
    why: str
    order: tuple[int, float, str]
    worth: float
    needed: bool = False
    urgent: bool = False
    mature: bool = False
    another: bool = False


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to serve a claim: a device, and the copies that must go."""

    memory: Memory
    device: str
    victims: list[Copy]


class _View:
    """A copy of what is held, which changes with what is planned."""

    def __init__(self, held: Held) -> None:
        self.held = held
        self.demands = {demand.model: demand for demand in held.demands}
        self.kept = kept(held)
        self.memory_of = {device: m for m in held.memories for device in m.devices}
        self.copies = [copy for copy in held.copies if copy.device in self.memory_of]
        self.loading = list(held.loading)
        self.room_bytes = {m.name: m.budget_bytes - m.used_bytes for m in held.memories}
        self.reserved: set[str] = set()
        self._here = Counter(copy.model for copy in self.copies)
        self._here.update(model for model, _ in self.loading)

    def demand(self, copy: Copy) -> Demand:
        """What is known of a copy's model; nothing if it has left the catalog."""
        return self.demands.get(copy.model) or Demand(copy.model, copy.size_bytes, 0.0)

    def total(self, demand: Demand) -> int:
        """Copies of a model, here and elsewhere, loads under way included."""
        return self._here[demand.model] + demand.elsewhere

    def spare(self, model: str) -> int:
        """Loaded copies of a model that its `min_copies` can do without."""
        here = sum(copy.model == model for copy in self.copies)
        demand = self.demands.get(model)
        return here if demand is None else here - max(0, demand.min_copies - demand.elsewhere)

    def in_memory(self, memory: Memory) -> list[Copy]:
        return [copy for copy in self.copies if copy.device in memory.devices]

    def is_quiet(self, copy: Copy) -> bool:
        """Idle, and nothing waits for it."""
        return not copy.busy and self.demand(copy).waiting == 0

    def is_last_active(self, copy: Copy, now: float) -> bool:
        """The only copy of a model that is, or a moment ago was, in use."""
        active = not self.is_quiet(copy) or now < copy.used_s + ACTIVE_S
        return active and self.total(self.demand(copy)) == 1

    def is_fresh(self, copy: Copy, now: float) -> bool:
        """Loaded a moment ago, and its first batch is still to come."""
        demand = self.demand(copy)
        begun = copy.busy or copy.used_s > copy.since_s
        return not begun and demand.waiting > 0 and now < copy.since_s + stay_s(demand.load_s)

    def rested_s(self, device: str) -> float:
        """When a device has rested from its last load for as long as that took."""
        last = (c for c in self.copies if c.device == device)
        return max((c.since_s + self.demand(c).load_s for c in last), default=0.0)

    def evict(self, copy: Copy, why: str) -> Evict:
        self.copies.remove(copy)
        if self.spare(copy.model) <= 0:  # what is left of it is to be there
            self.kept |= {copy.model}
        self._here[copy.model] -= 1
        self.room_bytes[self.memory_of[copy.device].name] += copy.size_bytes
        return Evict(copy.model, copy.device, why)

    def load(self, claim: Claim, device: str) -> Load:
        self.loading.append((claim.demand.model, device))
        self._here[claim.demand.model] += 1
        self.room_bytes[self.memory_of[device].name] -= claim.demand.size_bytes
        return Load(claim.demand.model, device, claim.why)


class ResidencyPlanner:
    """A `ResidencyPolicy` by the worth that a ranking gives."""

    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking
        self._missed = Missed()

    def on_requests(self, model: str, n: int, now: float) -> None:
        """N items of a model have arrived."""
        if n > 0:
            self._ranking.on_requests(model, n, now)

    def plan(self, held: Held, now: float) -> list[Action]:
        """What to do now; the evictions that a load needs come before it."""
        view = _View(held)
        self._ranking.keep_only(view.demands)
        self._missed.look(held, view.total, now)
        actions = [*self._timeouts(view, now), *self._trim(view, now)]
        for claim in self._claims(view, now):
            actions += self._serve(claim, view, now)
        for action in actions:
            if isinstance(action, Load):
                self._missed.forget(action.model)
            if isinstance(action, Evict) and action.model in view.demands:
                self._ranking.on_evict(view.demands[action.model], now)
        return actions

    def next_look_s(self, held: Held, now: float) -> float | None:
        """The next moment when a copy times out, has stayed, or a claim matures."""
        view = _View(held)
        moments = [self._timeout_s(view, copy) for copy in view.copies]
        moments += [self._missed.pays_s(demand, now) for demand in held.demands]
        claims = [c for c in self._claims(view, now) if not c.another]
        for claim in claims:
            moments.append(mature_s(claim.demand, now))
            if claim.demand.slack_s is not None:
                moments.append(now + claim.demand.slack_s - URGENT_S)
            if not claim.demand.measured:
                moments += [copy.used_s + ACTIVE_S for copy in view.copies]
        if claims:
            moments += [copy.since_s + stay_s(view.demand(copy).load_s) for copy in view.copies]
            moments += [view.rested_s(device) for device in view.memory_of]
        return min((m for m in moments if m is not None and m > now), default=None)

    def _timeout_s(self, view: _View, copy: Copy) -> float | None:
        timeout_s = view.demand(copy).idle_timeout_s
        if timeout_s is None or copy.model in view.kept or not view.is_quiet(copy):
            return None
        return max(copy.used_s, copy.since_s) + timeout_s

    def _timeouts(self, view: _View, now: float) -> Iterator[Action]:
        for copy in list(view.copies):
            at_s = self._timeout_s(view, copy)
            if at_s is not None and at_s <= now:
                yield view.evict(copy, "nobody has asked for it")

    def _trim(self, view: _View, now: float) -> Iterator[Action]:
        """Brings each memory under its budget, by what is measured."""
        for memory in view.held.memories:
            guesses = [
                demand.size_bytes
                for model, device in view.loading
                if device in memory.devices
                and (demand := view.demands.get(model))
                and not demand.measured
            ]
            over_bytes = -view.room_bytes[memory.name] - sum(guesses)
            may_go = [c for c in view.in_memory(memory) if c.model not in view.kept]
            idle = [copy for copy in may_go if not copy.busy]
            victims = self._least(view, idle, over_bytes, now)
            why = "the memory is over its budget"
            if victims is None:
                victims = idle
                left_bytes = over_bytes - sum(copy.size_bytes for copy in idle)
                busy = [copy for copy in may_go if copy.busy]
                for copy in self._least(view, busy, left_bytes, now) or busy:
                    yield Close(copy.model, copy.device, why)
                view.reserved.add(memory.name)
            for copy in victims:
                if copy.model not in view.kept:  # one that went before may have been to spare
                    yield view.evict(copy, why)

    def _claims(self, view: _View, now: float) -> list[Claim]:
        """What is wanted, the strongest first."""
        under_way = {model for model, _ in view.loading}
        claims = (
            self._claim(demand, view.total(demand), now)
            for demand in view.held.demands
            if (demand.waiting or demand.pinned or demand.min_copies)
            and not demand.blocked
            and demand.model not in under_way
        )
        return sorted((claim for claim in claims if claim), key=lambda claim: claim.order)

    def _claim(self, demand: Demand, total: int, now: float) -> Claim | None:
        model = demand.model
        needed = total < max(demand.min_copies, int(demand.pinned))
        if not needed and demand.waiting == 0:
            return None
        worth = self._ranking.worth(demand, None, total + 1, now)
        if needed:
            return Claim(demand, "it is to be there", (0, 0.0, model), worth, needed=True)
        if total > 0:
            return _another(demand, total, worth, self._missed.of(model))
        if demand.slack_s is not None and now + demand.slack_s - URGENT_S <= now:
            order = (1, demand.slack_s, model)
            return Claim(demand, "a deadline is at stake", order, worth, urgent=True, mature=True)
        matured_s = mature_s(demand, now)
        mature = matured_s <= now
        return Claim(demand, "work waits for it", (2, matured_s, model), worth, mature=mature)

    def _serve(self, claim: Claim, view: _View, now: float) -> list[Action]:
        """The actions that serve a claim; none when it must wait."""
        options = list(self._options(claim, view, now))
        if not options:
            self._reserve(claim, view)
            return []
        best = min(options, key=lambda option: self._price(option, view, now))
        why = f"{claim.demand.model} needs the room"
        busy = [copy for copy in best.victims if copy.busy]
        if busy:
            view.reserved.add(best.memory.name)
            return [Close(copy.model, copy.device, why) for copy in busy]
        evictions: list[Action] = [view.evict(copy, why) for copy in best.victims]
        return [*evictions, view.load(claim, best.device)]

    def _reserve(self, claim: Claim, view: _View) -> None:
        """Keeps a memory for a claim that has waited long enough, until it can be served."""
        able = [m for m in view.held.memories if self._can_hold(claim, m, view)]
        if able and (claim.mature or claim.needed):
            view.reserved.add(max(able, key=lambda m: (view.room_bytes[m.name], m.name)).name)

    def _can_hold(self, claim: Claim, memory: Memory, view: _View) -> bool:
        model = claim.demand.model
        having = {copy.device for copy in view.copies if copy.model == model}
        having |= {device for one, device in view.loading if one == model}
        if having.issuperset(memory.devices):  # more copies are wanted than there are devices
            return False
        stay = [c for c in view.in_memory(memory) if c.model in view.kept]
        room_bytes = memory.budget_bytes - sum(copy.size_bytes for copy in stay)
        return memory.name not in view.reserved and claim.demand.size_bytes <= room_bytes

    def _options(self, claim: Claim, view: _View, now: float) -> Iterator[_Option]:
        model = claim.demand.model
        taken = {device for _, device in view.loading}
        taken |= {copy.device for copy in view.copies if copy.model == model}
        taken |= {copy.device for copy in view.copies if view.is_fresh(copy, now)}
        for memory in view.held.memories:
            if not self._can_hold(claim, memory, view):
                continue
            free = [device for device in memory.devices if device not in taken]
            if claim.another:
                free = [device for device in free if device in view.held.idle_devices]
            victims = self._victims(claim, memory, view, now) if free else None
            if victims and not (claim.urgent or claim.needed):
                free = [device for device in free if view.rested_s(device) <= now]
            if victims is not None:
                yield from (_Option(memory, device, victims) for device in free)

    def _price(self, option: _Option, view: _View, now: float) -> tuple[object, ...]:
        """The least is taken: no one busy, nothing lost, an idle device, few loads, few copies."""
        lost = sum(self._worth(copy, view, now) * copy.size_bytes for copy in option.victims)
        loads = sum(device in option.memory.devices for _, device in view.loading)
        copies = sum(copy.device == option.device for copy in view.copies)
        idle = option.device in view.held.idle_devices
        busy = any(copy.busy for copy in option.victims)
        return busy, bool(option.victims), not idle, loads, lost, copies, option.device

    def _victims(self, claim: Claim, memory: Memory, view: _View, now: float) -> list[Copy] | None:
        """The copies that make room for a claim in a memory; None when there are not enough."""
        short_bytes = claim.demand.size_bytes - view.room_bytes[memory.name]
        may_go = [c for c in view.in_memory(memory) if self._may_go(c, claim, view, now)]
        unguarded = [copy for copy in may_go if not view.is_last_active(copy, now)]
        if claim.another:
            return self._least(view, unguarded, short_bytes, now)
        if claim.demand.measured:
            return self._least(view, may_go, short_bytes, now)
        victims = self._least(view, unguarded, short_bytes, now)
        if victims is None and (claim.mature or claim.needed):
            short_bytes -= int(memory.budget_bytes * OVERSHOOT_SHARE)
            victims = self._least(view, unguarded, short_bytes, now)
            return self._least(view, may_go, short_bytes, now) if victims is None else victims
        return victims

    def _may_go(self, copy: Copy, claim: Claim, view: _View, now: float) -> bool:
        """Whether a copy may go for a claim."""
        if copy.model in view.kept or copy.model == claim.demand.model:
            return False
        hysteresis = self._ranking.hysteresis
        beats = claim.needed or (
            hysteresis is not None and claim.worth >= hysteresis * self._worth(copy, view, now)
        )
        if view.is_quiet(copy):
            return hysteresis is None or beats or claim.mature
        if claim.another:
            return False
        served = copy.used_s > copy.since_s or now >= copy.since_s + MOST_STAY_S
        stayed = now >= copy.since_s + stay_s(view.demand(copy).load_s)
        return served and (beats or claim.urgent or (claim.mature and stayed))

    def _worth(self, copy: Copy, view: _View, now: float) -> float:
        demand = view.demand(copy)
        return self._ranking.worth(demand, copy, view.total(demand), now)

    def _least(
        self, view: _View, copies: Iterable[Copy], short_bytes: int, now: float
    ) -> list[Copy] | None:
        """The copies of least worth that are so large together; none of them without need."""
        ranked = sorted(
            copies,
            key=lambda c: (
                *(c.busy, not view.is_quiet(c), self._worth(c, view, now)),
                *(c.model, c.device),
            ),
        )
        chosen: list[Copy] = []
        spare = {copy.model: view.spare(copy.model) for copy in ranked}
        for copy in ranked:
            if short_bytes <= 0:
                break
            spare[copy.model] -= 1
            if spare[copy.model] < 0:
                continue
            chosen.append(copy)
            short_bytes -= copy.size_bytes
        if short_bytes > 0:
            return None
        for copy in reversed(chosen[:-1]):  # what came first may have become superfluous
            if copy.size_bytes <= -short_bytes:
                chosen.remove(copy)
                short_bytes += copy.size_bytes
        return chosen


def _another(demand: Demand, total: int, worth: float, missed_s: float) -> Claim | None:
    """A further copy of a model that has `total`, where that pays."""
    if missed_s >= demand.load_s and demand.queued:
        why = "it waited beside an idle device for as long as a load takes"
        return Claim(demand, why, (3, -missed_s, demand.model), worth, another=True)
    # The last of the backlog is done that much earlier; that must exceed what a load takes.
    saved_s = (demand.backlog_s / total - demand.load_s) / (total + 1)
    if saved_s > demand.load_s:
        why = "its backlog pays for a copy"
        return Claim(demand, why, (3, -saved_s, demand.model), worth, another=True)
    if demand.waited_s >= COST_LOADS * demand.load_s:
        why = "it waits behind other models"
        return Claim(demand, why, (3, -demand.waited_s, demand.model), worth, another=True)
    return None
