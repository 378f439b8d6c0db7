"""From the logits of a token classifier to entities with their place in the text.

Owns reading tags (BIO, BILOU, IOBES or plain labels), joining the windows of one text, making words
of word pieces, and the filter by label and score. Does not own the network, or where windows and
words are (the worker's tokeniser says so in `RunItem.offsets`).

A word belongs to the label with the largest probability, summed over the label's tags (B-X and I-X
are both X) and averaged over the word's pieces; an entity's score is the mean of that probability
over its pieces. Words of one label that touch are one entity, whatever their tags: models like to
mark every part of an address or a number as a beginning.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.runtimes.heads import among, softmax
from shoal.wire.records import Entity

Floats = npt.NDArray[np.float32]
Places = npt.NDArray[np.uint32]
Window = tuple[Places, Floats]

_TAG = re.compile(r"([BILUES])[-_](.+)")
_OUTSIDE = "O"
_BEGINS = "BUS"
_ENDS = "LEUS"


@dataclass(frozen=True, slots=True)
class Tags:
    """The classes of a token classifier: k tags, and the labels that they stand for.

    labels: names, the first of them for what is no entity. of: index of each tag's label, int64
    [k]. begins, ends: whether a tag is of the first, the last piece of an entity, bool [k].
    """

    labels: tuple[str, ...]
    of: npt.NDArray[np.int64]
    begins: npt.NDArray[np.bool_]
    ends: npt.NDArray[np.bool_]

    @classmethod
    def read(cls, names: Sequence[str]) -> Tags:
        """From the names of the classes, in the order of the logits."""
        # A plain label may look like a tag (E-MAIL): where no class begins or goes on, none is one.
        tagged = any(name[:2] in ("B-", "I-", "B_", "I_") for name in names)
        found = [_TAG.fullmatch(name) if tagged else None for name in names]
        plain = [match[2] if match else name for match, name in zip(found, names, strict=True)]
        signs = [match[1] if match else "" for match in found]
        labels = dict.fromkeys([_OUTSIDE, *plain])
        order = {label: index for index, label in enumerate(labels)}
        return cls(
            tuple(labels),
            np.array([order[label] for label in plain], np.int64),
            np.array([sign != "" and sign in _BEGINS for sign in signs]),
            np.array([sign != "" and sign in _ENDS for sign in signs]),
        )


def find(
    windows: Sequence[Window],
    tags: Tags,
    *,
    labels: Collection[str] = (),
    threshold: float | None = None,
) -> list[Entity]:
    """The entities of one text, in order.

    windows: for each window over the text, in order, the first and end character of each token's
    word (uint32 [t, 2], empty for special tokens) and the logits (float32 [t, k]). threshold: the
    least score. Raises `InvalidRequest` for a label that the model does not have.
    """
    known = tags.labels[1:]
    wanted = {known[index] for index in among(labels or known, known)}
    places, chances = _joined(windows)
    if not len(places):
        return []
    return [
        entity
        for entity in _entities(places, chances, tags)
        if entity.label in wanted and entity.score >= (threshold or 0.0)
    ]


def _joined(windows: Sequence[Window]) -> tuple[Places, Floats]:
    """All tokens of a text once, with their probabilities.

    Where two windows overlap, a token's numbers are those of the window in which it is farther
    from a cut. The first window's beginning and the last one's end are no cuts.
    """
    whole = np.empty((0, 2), np.uint32)
    chances = np.empty((0, 0), np.float32)
    depths = np.empty(0, np.int64)
    for index, (places, logits) in enumerate(windows):
        real = places[:, 1] > places[:, 0]
        here, scores = places[real], softmax(logits[real]) if real.any() else logits[real]
        n = len(here)
        from_left = np.arange(n) if index else np.full(n, n)
        from_right = np.arange(n)[::-1] if index + 1 < len(windows) else np.full(n, n)
        depth = np.minimum(from_left, from_right)
        if not len(whole):
            whole, chances, depths = here, scores, depth
            continue
        shared = _overlap(whole, here)
        at = len(whole) - shared
        better = depth[:shared] > depths[at:]
        chances[at:][better] = scores[:shared][better]
        depths[at:] = np.maximum(depths[at:], depth[:shared])
        depths = np.concatenate([depths, depth[shared:]])
        whole = np.concatenate([whole, here[shared:]])
        chances = np.concatenate([chances, scores[shared:]])
    return whole, chances


def _overlap(before: Places, after: Places) -> int:
    """How many of the last tokens before are the first tokens after: the most that can be."""
    most = min(len(before), len(after))
    for shared in range(most, 0, -1):
        if np.array_equal(before[-shared:], after[:shared]):
            return shared
    return 0


def _entities(places: Places, chances: Floats, tags: Tags) -> Iterator[Entity]:
    """Entities of tokens [t] in order, each a run of words with one label."""
    fresh = np.r_[True, (places[1:] != places[:-1]).any(axis=1)]
    starts = np.flatnonzero(fresh)
    pieces = np.diff(np.r_[starts, len(places)])
    means = np.add.reduceat(chances, starts, axis=0) / pieces[:, None]
    by_label = np.zeros((len(starts), len(tags.labels)), np.float32)
    np.add.at(by_label.T, tags.of, means.T)
    winners = by_label.argmax(axis=1)
    open_: _Run | None = None
    for word, label in enumerate(winners.tolist()):
        first, last = int(starts[word]), int(starts[word] + pieces[word] - 1)
        fits = tags.of == label
        apart = places[first, 0] > places[first - 1, 1]
        begins = apart and tags.begins[_best(chances[first], fits)]
        if open_ is not None and (label != open_.label or begins):
            yield open_.entity(tags)
            open_ = None
        if label == 0:
            continue
        if open_ is None:
            open_ = _Run(label, int(places[first, 0]))
        open_.add(int(places[last, 1]), float(by_label[word, label]), int(pieces[word]))
        if tags.ends[_best(chances[last], fits)]:
            yield open_.entity(tags)
            open_ = None
    if open_ is not None:
        yield open_.entity(tags)


def _best(chances: Floats, among: npt.NDArray[np.bool_]) -> int:
    return int(np.where(among, chances, -1.0).argmax())


@dataclass(slots=True)
class _Run:
    """An entity in the making. total: the sum of its pieces' probabilities."""

    label: int
    start: int
    end: int = 0
    total: float = 0.0
    pieces: int = 0

    def add(self, end: int, chance: float, pieces: int) -> None:
        self.end = end
        self.total += chance * pieces
        self.pieces += pieces

    def entity(self, tags: Tags) -> Entity:
        score = min(1.0, self.total / self.pieces)  # sums of probabilities may round past 1
        return Entity(tags.labels[self.label], self.start, self.end, score)
