"""What further copies of loaded models would have worked by now: ski rental.

While items of a model wait and a device without it idles, a further copy would work. Nobody knows
for how long that will go on; who loads once it has gone on for as long as a load takes pays at most
twice what the best choice in hindsight does (Karlin et al. 1988). Time in which nothing waits is
taken off again. Owns the sums. Does not own where a copy goes, or whether there is room
(`residency_plan`).
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.core.residency import Demand, Held


class Missed:
    """Device seconds by model."""

    def __init__(self) -> None:
        self._sums_s: dict[str, float] = {}
        self._missing: frozenset[str] = frozenset()
        self._looked_s: float | None = None

    def look(self, held: Held, total: Callable[[Demand], int], now: float) -> None:
        """Takes in what is now; what was at the last look held until now."""
        passed_s = 0.0 if self._looked_s is None else max(0.0, now - self._looked_s)
        known = {demand.model for demand in held.demands}
        for model in self._sums_s.keys() | self._missing:
            step_s = passed_s if model in self._missing else -passed_s
            self._sums_s[model] = self._sums_s.get(model, 0.0) + step_s
        self._sums_s = {m: s for m, s in self._sums_s.items() if s > 0.0 and m in known}
        having: dict[str, set[str]] = {}
        for copy in held.copies:
            having.setdefault(copy.model, set()).add(copy.device)
        for model, device in held.loading:
            having.setdefault(model, set()).add(device)
        self._missing = frozenset(
            demand.model
            for demand in held.demands
            if demand.queued
            and total(demand)
            and held.idle_devices - having.get(demand.model, set())
        )
        self._looked_s = now

    def of(self, model: str) -> float:
        """What a further copy of a model would have worked, in seconds."""
        return self._sums_s.get(model, 0.0)

    def forget(self, model: str) -> None:
        """A copy is on its way: it has to pay anew for the next."""
        self._sums_s.pop(model, None)

    def pays_s(self, demand: Demand, now: float) -> float | None:
        """When a further copy will have paid for its load, if all stays as it is."""
        if demand.model not in self._missing:
            return None
        return now + max(0.0, demand.load_s - self.of(demand.model))
