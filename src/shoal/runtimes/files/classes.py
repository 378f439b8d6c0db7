"""Classifying files: rows of numbers in, one row of probabilities each, out as results.

Owns cutting a batch into blocks, selecting labels, and one outcome per item. Does not own how a
file becomes a row, or the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
# `scores`, and `logits` where the graph gives them: float32 [n, k] each.
Judged = Mapping[str, Floats]

# Rows that run as one: more of them only take more memory.
_BLOCK = 16


def classify(
    items: Sequence[RunItem],
    labels: Sequence[str],
    read: Callable[[bytes], Row],
    judge: Callable[[Row], Judged],
) -> Outcomes:
    """A result with `scores`, and with `logits` where there are any, float32 [n, k], for each item.

    read: makes a row of a file. judge: what the network says of stacked rows. Probabilities do not
    say what the logits were: those of one row may all have been high, or all low.
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
    judged = [judge(block) for block in blocks]
    names = judged[0] if judged else {}
    arrays = {name: np.concatenate([one[name] for one in judged]) for name in names}
    outcomes: Outcomes = []
    begin = 0
    for item, end in zip(items, ends, strict=True):
        if isinstance(end, ShoalError):
            outcomes.append(end)
            continue
        found = {name: array[begin:end] for name, array in arrays.items()}
        outcomes.append(_result(item, labels, found))
        begin = end
    return outcomes


def _result(item: RunItem, labels: Sequence[str], found: Judged) -> Result | ShoalError:
    if not all(np.isfinite(array).all() for array in found.values()):
        return RunFailed("the network's numbers are not finite")
    asked = wanted(labels, item.params.labels)
    columns = [at for at, label in enumerate(labels) if label in asked]
    kept = {
        name: Array.of(np.ascontiguousarray(array[:, columns], np.float32))
        for name, array in found.items()
    }
    return Result(kept, [labels[at] for at in columns])
