"""Drives a policy on a mock clock: arrivals in, starts and ends out. No sleeping, no threads."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from shoal.core.policy import Place, Policy
from shoal.core.types import Batch, Item


@dataclass
class Driven:
    """What happened: when each item started, and every batch with its start and end."""

    starts_s: dict[str, float] = field(default_factory=dict)
    batches: list[tuple[float, float, Batch]] = field(default_factory=list)
    expired: list[tuple[float, Item]] = field(default_factory=list)

    def device_s(self, key: Callable[[Batch], str], until_s: float = 1e18) -> dict[str, float]:
        """Device seconds of batches that ended by `until_s`, by any key of them."""
        total: dict[str, float] = {}
        for start, end, batch in self.batches:
            if end <= until_s:
                total[key(batch)] = total.get(key(batch), 0.0) + end - start
        return total


def drive(
    policy: Policy,
    arrivals: Iterable[Item],
    took_s: Callable[[Batch], float],
    devices: int,
    *,
    absent: Collection[str] = (),
) -> Driven:
    """Runs until everything that arrived has been served or has expired.

    absent: models that are on no device.
    """

    def where(model: str) -> Place:
        return "absent" if model in absent else "free"

    done = Driven()
    waiting = sorted(arrivals, key=lambda item: item.arrived_s)[::-1]
    busy: list[tuple[float, int, Batch, float]] = []
    now, serial = 0.0, 0
    while True:
        while waiting and waiting[-1].arrived_s <= now:
            assert policy.add(waiting.pop(), now)
        while len(busy) < devices:
            batch = policy.next_batch(now, devices - len(busy), where)
            if batch is None:
                break
            serial += 1
            heapq.heappush(busy, (now + took_s(batch), serial, batch, now))
            for item in batch.items:
                assert item.id not in done.starts_s, "an item ran twice"
                done.starts_s[item.id] = now
        gone = policy.expire(now, where if len(busy) < devices else lambda _: "busy")
        done.expired += [(now, item) for item in gone]
        moments = [busy[0][0]] if busy else []
        moments += [waiting[-1].arrived_s] if waiting else []
        again = policy.deadline(now)
        if again is not None and (len(busy) < devices or not moments):
            moments.append(max(again, now + 1e-9))
        if not moments:
            return done
        now = max(now, min(moments))
        while busy and busy[0][0] <= now:
            end, _, batch, start = heapq.heappop(busy)
            done.batches.append((start, end, batch))
            policy.finished(batch, end - start, now)
