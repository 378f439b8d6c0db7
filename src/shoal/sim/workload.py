"""Traces of requests: when each comes and which model it asks for.

Owns the generator of popularity and the random models of comparisons. Does not own files (`shoal
plan` reads them) or what becomes of a trace (`residency`). Everything follows from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

_MIB = 1024 * 1024
_S_PER_MIN = 60.0


@dataclass(frozen=True, slots=True)
class SimModel:
    """A model of a simulation: what its copy takes of memory, and a load of time."""

    model: str
    size_bytes: int
    load_s: float
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request."""

    at_s: float
    model: str


@dataclass(frozen=True, slots=True)
class Popularity:
    """Poisson traffic over models of Zipf popularity: the k-th gets a share like 1 / k^exponent.

    rate: requests per second, all models together. drift: the share of the models that move to a
    random rank in each minute.
    """

    exponent: float
    rate: float
    minutes: float
    drift: float = 0.0

    def trace(self, models: Sequence[str], rng: random.Random) -> list[Arrival]:
        """The arrivals in order of time; which model is popular at the start is chance."""
        ranks = list(models)
        rng.shuffle(ranks)
        weights = list(accumulate(1.0 / k**self.exponent for k in range(1, len(ranks) + 1)))
        moves_per_s = self.drift * len(ranks) / _S_PER_MIN
        move_s = rng.expovariate(moves_per_s) if moves_per_s else float("inf")
        arrivals: list[Arrival] = []
        at_s = rng.expovariate(self.rate)
        while at_s < self.minutes * _S_PER_MIN:
            while move_s < at_s:
                model = ranks.pop(rng.randrange(len(ranks)))
                ranks.insert(rng.randrange(len(ranks) + 1), model)
                move_s += rng.expovariate(moves_per_s)
            arrivals.append(Arrival(at_s, rng.choices(ranks, cum_weights=weights)[0]))
            at_s += rng.expovariate(self.rate)
        return arrivals


def random_models(n: int, rng: random.Random) -> list[SimModel]:
    """Models as small ones are: log-normal sizes around 200 MiB, loads at about 400 MiB/s.

    A load takes 0.2 s besides; its speed differs between models by a factor of two or so.
    """
    models = []
    for number in range(n):
        mib = min(4000.0, max(20.0, rng.lognormvariate(5.3, 0.9)))
        load_s = 0.2 + mib / (400.0 * rng.lognormvariate(0.0, 0.5))
        models.append(SimModel(f"model-{number:03d}", int(mib * _MIB), load_s))
    return models
