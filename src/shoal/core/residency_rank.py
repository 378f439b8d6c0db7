"""What a loaded model is worth: the one thing in which residency policies differ.

Owns five rankings: `density` is ours, the others are what is common in the field, and the bound
that knows the future; to be compared. Does not own what is loaded and evicted (`residency_plan`).

A worth is compared with other worths of the same ranking only; where something must go, the least
goes first. A ranking remembers a few numbers for each model of the catalog and nothing else.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from shoal.core.residency import Copy, Demand
from shoal.errors import Bug

RankingName = Literal["density", "lru", "pin", "gdsf", "clairvoyant"]
RANKINGS: tuple[RankingName, ...] = get_args(RankingName)

RATE_S = 600.0
HYSTERESIS = 1.3
FAVOURITES_SHARE = 0.8
_MIB = 1024 * 1024


class Ranking(Protocol):
    """Ranks models by what they are worth in memory.

    hysteresis: a newcomer that is worth so many times a copy may replace it at once; None: every
    newcomer may.
    """

    @property
    def hysteresis(self) -> float | None:
        """See above."""

    def on_requests(self, model: str, n: int, now: float) -> None:
        """N items of a model have arrived."""

    def on_evict(self, demand: Demand, now: float) -> None:
        """A copy goes."""

    def keep_only(self, models: Container[str]) -> None:
        """Forgets what it knows of other models."""

    def worth(self, demand: Demand, copy: Copy | None, copies: int, now: float) -> float:
        """Worth of a copy, per byte; None: of one to be loaded. copies: of the model, this one in.

        Raises nothing; a model that was never asked for is worth 0.
        """


class _Remembering:
    """What rankings have in common that count requests: a number and a time for each model."""

    hysteresis: float | None = None

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, float]] = {}

    def on_requests(self, model: str, n: int, now: float) -> None:
        """Nothing is learnt."""

    def on_evict(self, demand: Demand, now: float) -> None:
        """Nothing is learnt."""

    def keep_only(self, models: Container[str]) -> None:
        """Forgets what it knows of other models."""
        for model in [m for m in self._known if m not in models]:
            del self._known[model]


class DensityRanking(_Remembering):
    """Load seconds saved per second and byte: request rate * load time / size.

    The rate is an exponentially weighted average with a memory of `rate_s` seconds, so it follows
    what becomes popular. Items that come together count as the logarithm of their number: a burst
    needs one load. Of a model with k copies, each saves a k-th.
    """

    hysteresis = HYSTERESIS

    def __init__(self, rate_s: float = RATE_S) -> None:
        super().__init__()
        self._rate_s = rate_s

    def on_requests(self, model: str, n: int, now: float) -> None:
        """N items of a model have arrived."""
        self._known[model] = (self._rate(model, now) + (1.0 + math.log2(n)) / self._rate_s, now)

    def worth(self, demand: Demand, copy: Copy | None, copies: int, now: float) -> float:
        """Load seconds saved per second and byte."""
        size_bytes = copy.size_bytes if copy else demand.size_bytes
        saved_s = self._rate(demand.model, now) * demand.load_s
        return saved_s / (max(1, size_bytes) * max(1, copies))

    def _rate(self, model: str, now: float) -> float:
        rate, at_s = self._known.get(model, (0.0, now))
        return rate * math.exp((at_s - now) / self._rate_s)


class LruRanking(_Remembering):
    """The copy that was used longest ago goes first."""

    def worth(
        self,
        demand: Demand,  # noqa: ARG002 - the protocol's signature
        copy: Copy | None,
        copies: int,  # noqa: ARG002
        now: float,
    ) -> float:
        """When it was last used."""
        return copy.used_s if copy else now


class PinRanking(LruRanking):
    """Favourites that are named beforehand stay; the others share the rest, longest unused first.

    Of two favourites the one named later goes first, if nothing else makes room for a large model.
    """

    def __init__(self, favourites: Sequence[str]) -> None:
        super().__init__()
        self._place = {model: place for place, model in enumerate(favourites)}

    def worth(self, demand: Demand, copy: Copy | None, copies: int, now: float) -> float:
        """When it was last used; more than any time for a favourite."""
        place = self._place.get(demand.model)
        return super().worth(demand, copy, copies, now) if place is None else 1e18 / (1 + place)


class GdsfRanking(_Remembering):
    """Greedy dual size frequency (Cherkasova 1998): age + requests * load time / size.

    Requests are counted while a model is loaded. The age rises to what the last victim was worth,
    so what is not asked for any more is overtaken by what is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._age = 0.0

    def on_requests(self, model: str, n: int, now: float) -> None:  # noqa: ARG002
        """N items of a model have arrived."""
        self._known[model] = (self._known.get(model, (0.0, 0.0))[0] + n, self._age)

    def on_evict(self, demand: Demand, now: float) -> None:
        """All others age, and it is forgotten."""
        self._age = max(self._age, self.worth(demand, None, 1, now))
        self._known.pop(demand.model, None)

    def worth(
        self,
        demand: Demand,
        copy: Copy | None,
        copies: int,  # noqa: ARG002
        now: float,  # noqa: ARG002
    ) -> float:
        """Age at its last request, and load seconds per MiB, so often as it was asked for."""
        size_bytes = copy.size_bytes if copy else demand.size_bytes
        count, age = self._known.get(demand.model, (0.0, 0.0))
        return age + count * demand.load_s * _MIB / max(1, size_bytes)


class ClairvoyantRanking(_Remembering):
    """Knows every arrival beforehand: load seconds / (bytes * time until the next request).

    Belady's rule (the copy that is needed last goes first) with sizes and costs. The bound that no
    real policy reaches; exact only for equal sizes and costs.
    """

    def __init__(self, arrivals_s: Mapping[str, Sequence[float]]) -> None:
        super().__init__()
        self._arrivals_s = arrivals_s

    def worth(self, demand: Demand, copy: Copy | None, copies: int, now: float) -> float:
        """Load seconds per byte and second until the next request."""
        times = self._arrivals_s.get(demand.model, ())
        after = bisect_right(times, now)
        if after == len(times):
            return 0.0
        size_bytes = copy.size_bytes if copy else demand.size_bytes
        wait_s = max(1e-9, times[after] - now)
        return demand.load_s / (max(1, size_bytes) * wait_s * max(1, copies))


@dataclass(frozen=True, slots=True)
class Known:
    """What is known before the first request. Only comparisons know how often and when.

    sizes: bytes by model. counts: requests by model. arrivals_s: their times, ascending.
    """

    sizes: Mapping[str, int]
    budget_bytes: int
    counts: Mapping[str, int]
    arrivals_s: Mapping[str, Sequence[float]]


def make_ranking(name: RankingName, known: Known | None = None) -> Ranking:
    """A ranking by its name. `pin` and `clairvoyant` need what is known beforehand."""
    if name == "density":
        return DensityRanking()
    if name == "lru":
        return LruRanking()
    if name == "gdsf":
        return GdsfRanking()
    if known is None:
        raise Bug(f"the ranking `{name}` needs to know what will come")
    return PinRanking(favourites(known)) if name == "pin" else ClairvoyantRanking(known.arrivals_s)


def favourites(known: Known) -> list[str]:
    """The most popular models that fit into most of the memory, the first of them first."""
    room_bytes = int(known.budget_bytes * FAVOURITES_SHARE)
    chosen: list[str] = []
    for model in sorted(known.sizes, key=lambda m: (-known.counts.get(m, 0), m)):
        if known.sizes[model] <= room_bytes:
            chosen.append(model)
            room_bytes -= known.sizes[model]
    return chosen
