"""When the process of a model that fails everything is started anew, and when the model rests.

A batch counts against its model on a device when not one of its items succeeded, and the caller was
not to blame for all of them; a success forgives all. So does an item that has come out well before
and does again: then the process is well and the items were bad, however many a client sends of
them. A process that dies has a pause of its own (`supervise`) and does not count here. Owns the
counting. Does not own ending processes (`resident`), or what a model that rests means for its items
(`faults`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

# So many batches of as many different requests: one request alone cannot stop a model.
FAILED_BATCHES = 3
FIRST_REST_S = 5.0
MOST_REST_S = 300.0

Place = tuple[str, str]  # a device, and a model on it
Advice = Literal["go on", "renew", "rest"]


@dataclass(slots=True)
class _Streak:
    """What has failed since the last success. renewed: the process was started anew meanwhile."""

    batches: int = 0
    requests: set[str] = field(default_factory=set)
    renewed: bool = False
    rests: int = 0

    def rest_s(self) -> float:
        """How long the next rest is: each is twice as long as the one before."""
        return min(MOST_REST_S, FIRST_REST_S * 2.0**self.rests)


class Breaker:
    """Counts by place."""

    def __init__(self) -> None:
        self._streaks: dict[Place, _Streak] = {}

    def on_success(self, place: Place) -> None:
        """Something of a batch came out well."""
        self._streaks.pop(place, None)

    def on_failure(self, place: Place, requests: Iterable[str]) -> tuple[Advice, float]:
        """A batch failed whole; what to do now, and for how many seconds.

        requests: those that its items are of.
        """
        streak = self._streaks.setdefault(place, _Streak())
        streak.batches += 1
        if len(streak.requests) < FAILED_BATCHES:
            streak.requests.update(requests)
        if min(streak.batches, len(streak.requests)) < FAILED_BATCHES:
            return "go on", 0.0
        streak.batches = 0
        streak.requests.clear()
        if not streak.renewed:
            streak.renewed = True
            return "renew", 0.0
        rest_s = streak.rest_s()
        streak.rests += 1
        return "rest", rest_s
