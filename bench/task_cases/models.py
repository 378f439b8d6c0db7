"""Part 1: every task of every model, bare and served.

For each case the best batch size of the bare runtime is found first; then bare and served rounds
are taken in turn, in alternating order, so that a drifting machine touches both alike. Ratios are
of rounds side by side. Owns the rounds and the table's rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx
import uvloop
from harness import Report, Server, median
from measure.figures import quantile, steady_rate
from measure.load import saturate
from measure.rounds import rotated, rounds

from shoal.catalog.load import load
from shoal.catalog.schema import Entry
from shoal.runtimes.registry import available
from task_cases.bare import Bare
from task_cases.cases import Case, case

# Below this an input is hardly computed: what is compared then is reading and carrying it.
LEAST_DEVICE_MS = 1.0
# Calls that are open together: what keeps the devices busy for two seconds, within these bounds.
AHEAD_S = 2.0
LEAST_OPEN, MOST_OPEN = 4, 24
SERVED, BARE = "served", "bare"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured of a case.

    seconds: of a round that has `least_inputs` for each device in that time; others are longer, up
    to `most_s`. batches: sizes to try, as far as one takes no longer than `most_s`. budget_s: of
    all rounds.
    """

    batches: tuple[int, ...]
    rounds: int
    seconds: float
    least_inputs: int
    most_s: float
    budget_s: float


FULL = Effort((8, 32, 128), 3, 0.9, 5, 4.0, 25.0)
QUICK = Effort((16,), 1, 0.2, 1, 0.4, 5.0)


@dataclass(slots=True)
class Measured:
    """One case: inputs per second of each round, and the seconds of a call that is alone."""

    case: Case
    batch: int
    processes: int
    rates: dict[str, list[float]] = field(default_factory=lambda: {BARE: [], SERVED: []})
    alone_s: float = math.nan

    @property
    def ratio(self) -> float:
        """Served over bare: the median over rounds."""
        pairs = zip(self.rates[SERVED], self.rates[BARE], strict=True)
        return median([served / bare for served, bare in pairs])

    @property
    def device_ms(self) -> float:
        """What the bare runtime takes for an input on one device."""
        return 1e3 * self.processes / median(self.rates[BARE])


def run(report: Report, server: Server, *, quick: bool) -> None:
    """Part 1."""
    effort = QUICK if quick else FULL
    served = {
        one["id"]
        for one in httpx.get(f"{server.url}/v1/models").json()["data"]
        if one["state"] != "unavailable"
    }
    made: list[Measured] = []
    for entry in load(None).entries:
        if entry.id not in served:
            print(f"left out: {entry.id}, which this environment does not serve")
            continue
        if reason := available(entry.runtime):
            print(f"left out: {entry.id}, whose runtime this Python cannot make bare: {reason}")
            continue
        made += _measure_model(server, entry, effort)
    cards = httpx.get(f"{server.url}/v1/models").json()["data"]
    memory_mib = {one["id"]: one.get("memory_bytes", 0) / 2**20 for one in cards}
    for one in made:
        report.add(**_row(one, memory_mib))
    weighed = [one.ratio for one in made if one.device_ms >= LEAST_DEVICE_MS]
    report.headline["served_models"] = len({one.case.entry.id for one in made})
    report.headline["served_over_raw_min"] = min(weighed, default=math.nan)
    report.headline["served_over_raw_median"] = median(weighed) if weighed else math.nan


def _measure_model(server: Server, entry: Entry, effort: Effort) -> list[Measured]:
    made = []
    with Bare(entry) as bare:
        for task in entry.tasks:
            if (one := case(entry, task)) is None:
                print(f"left out: {entry.id} {task}, whose inputs are not installed")
                continue
            made.append(_measure(server, bare, one, effort))
    return made


def _measure(server: Server, bare: Bare, one: Case, effort: Effort) -> Measured:
    bare.take(one)
    tried = {1: bare.rate(1, effort.seconds / 3)}
    item_s = bare.processes * one.each / tried[1]
    for size in effort.batches:
        if size * item_s <= effort.most_s:
            tried[size] = bare.rate(size, effort.seconds / 3)
    best = max(tried, key=lambda size: tried[size])
    made = Measured(one, best, bare.processes)
    seconds = min(effort.most_s, max(effort.seconds, effort.least_inputs * item_s))
    inputs_s = AHEAD_S * tried[best]
    calls_open = min(MOST_OPEN, max(LEAST_OPEN, int(inputs_s / (one.per_request * one.each))))
    _served(server, one, calls_open, seconds)  # loads it, and again where that pays
    measure = {
        BARE: lambda: bare.rate(best, seconds),
        SERVED: lambda: _served(server, one, calls_open, seconds),
    }
    for number in rounds(effort.rounds, effort.budget_s):
        for name in rotated(list(measure), number):
            made.rates[name].append(measure[name]())
    calls = uvloop.run(saturate(server.url, one.alone(server.url), 1, effort.seconds, 3))
    made.alone_s = quantile([call.latency_s for call in calls], 0.5)
    return made


def _served(server: Server, one: Case, concurrency: int, seconds: float) -> float:
    """Inputs per second over HTTP, in a closed loop that keeps the queue filled."""
    requests = one.requests(server.url)
    calls = uvloop.run(saturate(server.url, requests, concurrency, seconds))
    inputs = float(one.per_request * one.each)
    done = [(call.done_s, inputs) for call in calls]
    # At the start the queue is empty, and at the end one device runs out before another.
    rate = steady_rate(done, concurrency // 4, len(done) - concurrency // 2)
    if math.isnan(rate):
        return inputs * len(calls) / (max(call.done_s for call in calls) - calls[0].due_s)
    return rate


def _row(one: Measured, memory_mib: Mapping[str, float]) -> dict[str, object]:
    entry = one.case.entry
    what = "candidate" if one.case.task == "score" else entry.inputs[0]
    return {
        "1. model": entry.id,
        "task": one.case.task,
        "input": what,
        "bare/s": median(one.rates[BARE]),
        "batch": one.batch * one.case.each,
        "device ms": one.device_ms,
        "served/s": median(one.rates[SERVED]),
        "a request": one.case.per_request * one.case.each,
        "served/bare": one.ratio,
        "counts": "yes" if one.device_ms >= LEAST_DEVICE_MS else "no",
        "alone p50 ms": 1e3 * one.alone_s,
        "MiB": memory_mib.get(entry.id, 0.0),
    }
