"""What is asked of each model, whether it is here or not.

Owns the counts that the broker last gave, how long items have waited for models that are not here,
and operators' wishes. Does not own what is done about it (`residency`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Literal

from shoal.core.types import Lane

Wish = Literal["here", "somewhere"]

WISH_S = 60.0
MAX_WISHES = 1_000


class DemandBook:
    """Waiting items by the models' keys; times are monotonic seconds."""

    def __init__(self) -> None:
        self.waiting: dict[str, int] = {}
        self._waited_s: dict[str, float] = {}
        self._counted_s: float | None = None
        self._wishes: dict[str, tuple[Wish, float]] = {}

    def on_counts(
        self,
        counts: Mapping[tuple[str, Lane], int],
        here: Container[str],
        now_s: float,
        growing: Mapping[str, int] | None = None,
    ) -> None:
        """The broker's counts of all lines. here: the models that are loaded.

        growing: texts that have their slots, here or elsewhere: the broker counts them until they
        are whole, which may take minutes, and they wait for nothing.
        """
        waiting: dict[str, int] = {}
        for (model, _), n in counts.items():
            waiting[model] = waiting.get(model, 0) + n
        for model, n in (growing or {}).items():
            if model in waiting:
                waiting[model] = max(0, waiting[model] - n)
        passed_s = now_s - self._counted_s if self._counted_s is not None else 0.0
        # Those that came in between have waited for half of the time, on average.
        self._waited_s = {
            model: self._waited_s.get(model, 0.0)
            + passed_s * (n + min(n, self.waiting.get(model, 0))) / 2
            for model, n in waiting.items()
            if n and model not in here
        }
        self.waiting = waiting
        self._counted_s = now_s

    def waited_s(self, model: str) -> float:
        """Item-seconds that what waits has waited for a model that is not here."""
        return self._waited_s.get(model, 0.0)

    def wish(self, model: str, wish: Wish, now_s: float) -> None:
        """An operator wants a model loaded; it is tried for a while."""
        if len(self._wishes) < MAX_WISHES:
            self._wishes[model] = (wish, now_s + WISH_S)

    def wished(self, model: str, now_s: float) -> Wish | None:
        """Where somebody wants it loaded, if anybody does."""
        wish, until_s = self._wishes.get(model, (None, now_s))
        return wish if until_s > now_s else None

    def fulfil(self, model: str) -> None:
        """It is loaded, or cannot be."""
        self._wishes.pop(model, None)
