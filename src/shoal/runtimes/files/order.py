"""The order in which people read what lies on a page.

Owns that order: columns from left to right, else from top to bottom, else along the row. It is the
recursive XY-cut (Nagy and Seth, 1984) with one rule more for lines of text: a gap between columns
goes before a gap between rows only where both sides are prose. The cells of a table are short, and
a table is read by rows. Does not own finding anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Boxes = npt.NDArray[np.float32]

# A line of prose is so many times as long as it is high.
_PROSE = 8.0
# Columns are at least so many line heights apart.
_GUTTER = 0.5


def reading_order(boxes: Boxes, *, lines: bool) -> list[int]:
    """Indices of the boxes, float32 [n, 4] as left, top, right, bottom, in reading order.

    lines: they are lines of text; else whole regions.
    """
    order: list[int] = []
    waiting = [np.arange(len(boxes))]
    while waiting:
        group = waiting.pop()
        parts = _cut(boxes, group, lines=lines)
        if len(parts) == 1:
            order += group[np.lexsort((boxes[group, 1], boxes[group, 0]))].tolist()
        else:
            waiting += reversed(parts)
    return order


def _cut(
    boxes: Boxes, group: npt.NDArray[np.int64], *, lines: bool
) -> Sequence[npt.NDArray[np.int64]]:
    """The two parts of a group in the order of reading, or the group itself: one row."""
    if len(group) < 2:
        return [group]
    height = float(np.median(boxes[group, 3] - boxes[group, 1]))
    left, right = _split(boxes, group, axis=0, least=_GUTTER * height if lines else 0.0)
    if len(right) and (not lines or (_is_prose(boxes[left]) and _is_prose(boxes[right]))):
        return [left, right]
    above, below = _split(boxes, group, axis=1, least=0.0)
    return [above, below] if len(below) else [group]


def _split(
    boxes: Boxes, group: npt.NDArray[np.int64], *, axis: int, least: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The group before and after the widest gap along an axis; nothing after where there is none.

    least: a gap must be wider.
    """
    begins, ends = boxes[group, axis], boxes[group, axis + 2]
    by_begin = np.argsort(begins, kind="stable")
    reached = np.maximum.accumulate(ends[by_begin])
    gaps = begins[by_begin][1:] - reached[:-1]
    at = int(gaps.argmax())
    if gaps[at] <= least:
        return group, group[:0]
    return group[by_begin[: at + 1]], group[by_begin[at + 1 :]]


def _is_prose(boxes: Boxes) -> bool:
    """Whether most lines are long, and there are two at least."""
    widths, heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    return len(boxes) > 1 and float(np.median(widths / np.maximum(heights, 1.0))) >= _PROSE
