"""How well vectors of pairs belong together.

Owns the measures. Does not own which pairs they are taken of, or the vectors. Numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
_ROWS = 256  # compared at once


class Measures(msgspec.Struct, frozen=True):
    """What was measured on pairs that were held out.

    recall_at_1: share of anchors whose nearest candidate is their positive. mrr: mean of 1 / its
    rank. cosine: mean of anchors with their positives; cosine_others: with all other candidates.
    """

    pairs: int
    candidates: int
    recall_at_1: float
    mrr: float
    cosine: float
    cosine_others: float


def measure(anchors: Floats, candidates: Floats, right: Sequence[set[int]]) -> Measures:
    """Measures anchors [n, d] against candidates [m, d], both of length 1.

    right[i]: the candidates that belong to anchor i; the best of them counts. One that is as near
    counts as nearer, so that vectors that are all alike are no success. All numbers are finite.
    """
    ranks: list[int] = []
    own = others = 0.0
    for start in range(0, len(anchors), _ROWS):
        cosines = anchors[start : start + _ROWS] @ candidates.T
        for row, mine in zip(cosines, right[start : start + _ROWS], strict=True):
            chosen = np.fromiter(mine, np.int64)
            rest = np.delete(row, chosen)
            best = row[chosen].max()
            ranks.append(1 + int((rest >= best).sum()))
            own += float(row[chosen].mean())
            others += float(rest.mean()) if len(rest) else 0.0
    found = np.asarray(ranks)
    return Measures(
        pairs=len(anchors),
        candidates=len(candidates),
        recall_at_1=float((found == 1).mean()),
        mrr=float((1 / found).mean()),
        cosine=own / len(anchors),
        cosine_others=others / len(anchors),
    )
