"""Training an adapter on pairs: batches, the loss, the measures, and the best state so far.

Owns the order of the pairs, the loss and its schedule, when it is measured and when it ends. Does
not own reading pairs (`pairs`), the network (`encoder`) or what a terminal shows of it.

The loss is the softmax over the batch: each anchor is to be nearer to its own positive than to all
others' (Henderson et al. 2017, "Efficient Natural Language Response Suggestion", 4.4; known as
multiple negatives ranking), with cosines times 20. Texts that are equal to the positive are left
out of the others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shoal.clock import monotonic
from shoal.errors import ModelUnavailable
from shoal.train.encoder import Encoder, Ids
from shoal.train.measures import Measures, measure
from shoal.train.pairs import Fault, Pair, Split, refuse, same

_SCALE = 20.0
_WARM_UP = 0.1  # share of the steps in which the rate rises
_MAX_NORM = 1.0  # of a step's gradient
# Held-out pairs are found this much worse than by the base: nothing will come of it.
_COLLAPSED = 0.5

End = Literal["done", "time", "interrupted", "collapsed"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How it is trained. rate: of learning, at its highest. limit_s: None for none."""

    epochs: int
    batch_pairs: int
    rate: float
    seed: int
    limit_s: float | None = None
    truncate: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One step that was made; epochs and steps are counted from 1."""

    number: int
    of: int
    epoch: int
    loss: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What the held-out pairs say after a step."""

    step: Step
    measures: Measures


@dataclass(slots=True)
class Run:
    """What came of it. best: the state that the network was left in."""

    before: Measures
    end: End = "done"
    best: Measured | None = None
    measured: list[Measured] = field(default_factory=list)
    trained_s: float = 0.0

    @property
    def better(self) -> bool:
        """Whether held-out pairs are found at better ranks than by the base.

        That they are nearer to one another is not enough: nobody who searches would notice.
        """
        return self.best is not None and _ranks(self.best.measures) > _ranks(self.before)


@dataclass(frozen=True, slots=True)
class _Side:
    """The pairs of one side, and their ids."""

    pairs: list[Pair]
    ids: list[Ids]


class Training:
    """One training of an encoder's adapter.

    on_step hears of each step, and of each measure after one; `stopped` is asked after each step
    and ends it early.
    """

    def __init__(
        self,
        encoder: Encoder,
        plan: Plan,
        on_step: Callable[[Step | Measured], None],
        stopped: Callable[[], bool],
    ) -> None:
        self._encoder = encoder
        self._plan = plan
        self._on_step = on_step
        self._stopped = stopped

    def run(self, path: Path, split: Split, rank: int, alpha: int) -> Run:
        """Trains; the network then has the weights of the best state that was measured.

        path: of the pairs, for messages. Raises `OperatorError` for texts that are too long.
        """
        import torch

        faults: list[Fault] = []
        trained = self._side(split.trained, faults)
        held_out = self._side(split.held_out, faults)
        refuse(path, sorted(faults, key=lambda fault: fault.line))
        begun_s = monotonic()
        before = self._measured(held_out)
        if before is None:
            raise ModelUnavailable(f"`{self._encoder.entry.id}` gives vectors that are not finite")
        run = Run(before)
        torch.manual_seed(self._plan.seed)
        weights = self._encoder.adapted(rank, alpha)
        self._learn(run, weights, trained, held_out, begun_s)
        run.trained_s = monotonic() - begun_s
        return run

    def _side(self, pairs: list[Pair], faults: list[Fault]) -> _Side:
        made = [self._encoder.ids(pair, truncate=self._plan.truncate) for pair in pairs]
        faults += [each for each in made if isinstance(each, Fault)]
        return _Side(pairs, [each for each in made if isinstance(each, Ids)])

    def _learn(
        self, run: Run, weights: list[Any], trained: _Side, held_out: _Side, begun_s: float
    ) -> None:
        import torch

        plan = self._plan
        per_epoch = math.ceil(len(trained.pairs) / plan.batch_pairs)
        total = per_epoch * plan.epochs
        optimiser = torch.optim.AdamW(weights, lr=plan.rate)
        order = list(range(len(trained.pairs)))
        rng = random.Random(plan.seed)  # noqa: S311 an order is no secret
        kept: list[Any] = []
        for number in range(1, total + 1):
            at = (number - 1) % per_epoch
            if at == 0:
                rng.shuffle(order)
            for group in optimiser.param_groups:
                group["lr"] = plan.rate * _slope(number, total)
            loss = self._step(trained, order[at::per_epoch], optimiser, weights)
            step = Step(number, total, 1 + (number - 1) // per_epoch, loss)
            self._on_step(step)
            run.end = self._end(begun_s) if number < total else "done"
            if run.end == "done" and at < per_epoch - 1:
                continue
            measures = self._measured(held_out) if math.isfinite(loss) else None
            if measures is None:
                run.end = "collapsed"
                break
            measured = Measured(step, measures)
            self._on_step(measured)
            run.measured.append(measured)
            if run.best is None or _worth(measures) > _worth(run.best.measures):
                run.best = measured
                kept = [each.detach().clone() for each in weights]
            if measures.mrr < _COLLAPSED * run.before.mrr:
                run.end = "collapsed"
            if run.end != "done":
                break
        with torch.no_grad():
            for each, best in zip(weights, kept or weights, strict=True):
                each.copy_(best)

    def _end(self, begun_s: float) -> End:
        """Why this was the last step, or `done` for one like any other."""
        if self._stopped():
            return "interrupted"
        limit_s = self._plan.limit_s
        return "time" if limit_s is not None and monotonic() - begun_s >= limit_s else "done"

    def _step(
        self, side: _Side, chosen: Sequence[int], optimiser: Any, weights: list[Any]
    ) -> float:
        import torch

        self._encoder.network.train()
        pairs = [side.pairs[index] for index in chosen]
        ids = [side.ids[index] for index in chosen]
        anchors = self._encoder.vectors([each.anchor for each in ids])
        documents = [each.positive for each in ids]
        documents += [negative for each in ids for negative in each.negatives]
        cosines = anchors @ self._encoder.vectors(documents).T
        cosines = cosines.masked_fill(torch.tensor(others_that_are_right(pairs)), -math.inf)
        loss = torch.nn.functional.cross_entropy(_SCALE * cosines, torch.arange(len(ids)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, _MAX_NORM)
        optimiser.step()
        optimiser.zero_grad()
        return float(loss.detach())

    def _measured(self, side: _Side) -> Measures | None:
        """The measures of pairs; None where vectors are not finite."""
        candidates: dict[str, list[int]] = {}
        for pair, ids in zip(side.pairs, side.ids, strict=True):
            found = [ids.positive, *ids.negatives]
            candidates |= dict(zip(map(same, pair.texts[1:]), found, strict=True))
        at = {text: index for index, text in enumerate(candidates)}
        mine: dict[str, set[int]] = {}
        for pair in side.pairs:
            mine.setdefault(same(pair.anchor), set()).add(at[same(pair.positive)])
        anchors = self._encoder.measured([each.anchor for each in side.ids]).numpy()
        documents = self._encoder.measured(list(candidates.values())).numpy()
        if not (np.isfinite(anchors).all() and np.isfinite(documents).all()):
            return None
        return measure(anchors, documents, [mine[same(pair.anchor)] for pair in side.pairs])


def _slope(number: int, total: int) -> float:
    """The rate of a step as a share of the highest: up in a straight line, then down."""
    warm = max(1.0, _WARM_UP * total)
    return min(number / warm, (total + 1 - number) / max(1.0, total + 1 - warm))


def others_that_are_right(pairs: Sequence[Pair]) -> list[list[bool]]:
    """Where a document is no negative of an anchor though it is another's: it is right as well.

    [n, n + negatives]. That is a text equal to the anchor's positive, or a positive of an equal
    anchor.
    """
    anchors = [same(pair.anchor) for pair in pairs]
    positives = [same(pair.positive) for pair in pairs]
    right: dict[str, set[str]] = {}
    for anchor, positive in zip(anchors, positives, strict=True):
        right.setdefault(anchor, set()).add(positive)
    documents = positives + [same(text) for pair in pairs for text in pair.negatives]
    return [
        [index != row and text in right[anchor] for index, text in enumerate(documents)]
        for row, anchor in enumerate(anchors)
    ]


def _ranks(measures: Measures) -> tuple[float, float]:
    """At which ranks positives are found: the mean first, then how many are at the first."""
    return (measures.mrr, measures.recall_at_1)


def _worth(measures: Measures) -> tuple[float, float, float]:
    """What makes one state better than another; between equal ranks how far apart they are."""
    return (*_ranks(measures), measures.cosine - measures.cosine_others)
