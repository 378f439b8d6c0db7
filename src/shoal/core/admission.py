"""Whether a request can be answered in time, before it is queued.

The wait of new work on W devices with M models that have work, and batches of at most q seconds:

    wait <= backlog / W + (2 + ceil((M - 1) / W)) * q

The first term is what was there before, as far as it goes first: devices are shared fairly, so a
line does not wait for all that others have (`ahead_s`). The second is the batch that has just
begun, the turn of every other model, and the batch itself. When little is there, one device has
worked it off, one after the other, before all those turns could happen: that is the other bound,
taken twice because estimates of so little are rough.
A request whose deadline comes before the lesser of the two, its own cost included, is refused at
once, with the time after which it would not be: a refusal now is worth more than a timeout later.
Cost is counted, not requests.

Owns the bound. Does not own where its numbers come from (`shoal.gateway.backlog`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_RETRY_S = 0.5
_ROUGH = 2.0


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """What a gateway knows of the fleet.

    backlog_s: device seconds of the work that goes first (`ahead_s`). devices: how many
    share it. active_models: how many models have work. quantum_s: the longest batch of the lane.
    """

    backlog_s: float
    devices: int
    active_models: int
    quantum_s: float


def ahead_s(
    total_s: float,
    lane_s: float,
    line_s: float,
    cost_s: float,
    *,
    lane_share: float,
    line_share: float,
) -> float:
    """Device seconds of other work that may run before new work of `cost_s` is done.

    Of all that waits (`total_s`), `lane_s` is of the new work's lane and `line_s` of its model in
    that lane. A lane gets at least its share of the devices, and a line its share of the lane's;
    so while a fair share works off what is its own, others have run (1 / share - 1) times as much.
    The least of the three bounds counts. 0 exactly when nothing waits.
    """
    by_lane_s = (lane_s + cost_s) / lane_share - cost_s
    by_line_s = (line_s + cost_s) / (lane_share * line_share) - cost_s
    return max(0.0, min(total_s, by_lane_s, by_line_s))


def wait_s(load: FleetLoad) -> float:
    """The bound on the wait of work that comes now, its own batch included."""
    devices = max(1, load.devices)
    turns = 2 + math.ceil(max(0, load.active_models - 1) / devices)
    return load.backlog_s / devices + turns * load.quantum_s


def one_by_one_s(backlog_s: float, cost_s: float) -> float:
    """The bound on the time until work of `cost_s` is done by one device behind all the rest."""
    return _ROUGH * (backlog_s + cost_s)


def needed_s(load: FleetLoad, cost_s: float) -> float:
    """The bound on the time until work of `cost_s` that comes now is done."""
    in_turn_s = wait_s(load) + cost_s / max(1, load.devices)
    return min(in_turn_s, one_by_one_s(load.backlog_s, cost_s))


def refuse(load: FleetLoad, cost_s: float, time_s: float) -> float | None:
    """None to admit; else the seconds after which a request like this would be admitted.

    cost_s: device seconds of the request. time_s: time until its deadline.
    A request on an idle fleet is always admitted: if that is too slow, the deadline will tell.
    """
    if load.backlog_s <= 0.0:
        return None
    late_s = needed_s(load, cost_s) - time_s
    return max(LEAST_RETRY_S, late_s) if late_s > 0 else None
