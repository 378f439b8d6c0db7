"""Classifying files: rows of numbers in, one row of probabilities each, out as results.

Owns cutting a batch into blocks, selecting labels, and one outcome per item. Does not own how a
file becomes a row, or the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import RunFailed, ShoalError
from shoal.ipc.messages import RunItem
from shoal.runtimes.holding import Outcomes, each_blob
from shoal.runtimes.labels import wanted
from shoal.wire.arrays import Array
from shoal.wire.envelope import Result

Floats = npt.NDArray[np.float32]
Row = npt.NDArray[Any]

# Rows that run as one: more of them only take more memory.
_BLOCK = 16
_SMALLEST = np.finfo(np.float32).tiny


def classify(
    items: Sequence[RunItem],
    labels: Sequence[str],
    read: Callable[[bytes], Row],
    chances: Callable[[Row], Floats],
) -> Outcomes:
    """A result with `scores` and `logits`, float32 [n, k], for each item.

    read: makes a row of a file. chances: probabilities float32 [n, k] of stacked rows. The logits
    are the logarithms of the probabilities, which is what they are up to a constant.
    """
    rows: list[Row] = []
    ends: list[int | ShoalError] = []
    for item in items:
        try:
            wanted(labels, item.params.labels)
            rows += each_blob(item, read)
            ends.append(len(rows))
        except ShoalError as error:
            ends.append(error)
    blocks = [np.stack(rows[at : at + _BLOCK]) for at in range(0, len(rows), _BLOCK)]
    scores: Floats = np.empty((0, len(labels)), np.float32)
    if blocks:
        scores = np.concatenate([chances(block) for block in blocks])
    outcomes: Outcomes = []
    begin = 0
    for item, end in zip(items, ends, strict=True):
        if isinstance(end, ShoalError):
            outcomes.append(end)
            continue
        outcomes.append(_result(item, labels, scores[begin:end]))
        begin = end
    return outcomes


def _result(item: RunItem, labels: Sequence[str], scores: Floats) -> Result | ShoalError:
    if not np.isfinite(scores).all():
        return RunFailed("the network's numbers are not finite")
    asked = wanted(labels, item.params.labels)
    columns = [at for at, label in enumerate(labels) if label in asked]
    kept = np.ascontiguousarray(scores[:, columns], np.float32)
    logits = np.log(np.maximum(kept, _SMALLEST))
    names = [labels[at] for at in columns]
    return Result({"scores": Array.of(kept), "logits": Array.of(logits)}, names)
