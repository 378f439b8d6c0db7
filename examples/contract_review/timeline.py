"""Which model ran when, as an SVG and as text.

Owns the drawing. Does not own the notes that are drawn (`calls`).
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from examples.contract_review.calls import Call

_NAMES_PX, _PLOT_PX, _ROW_PX, _BAR_PX, _AXIS_PX = 220, 900, 26, 18, 24
_TICKS = 10


def _rows(calls: Sequence[Call]) -> dict[str, list[Call]]:
    """The calls of each model; the model that was asked first stands first."""
    rows: dict[str, list[Call]] = {}
    for call in sorted(calls, key=lambda call: call.start_s):
        rows.setdefault(call.model, []).append(call)
    return rows


def as_svg(calls: Sequence[Call]) -> str:
    """A row for each model, a bar for each call, a colour for each document.

    A bar spans the time that the caller waited: in the queue, and while the model ran.
    """
    rows = _rows(calls)
    total_s = max((call.end_s for call in calls), default=0.0) or 1.0
    scale = _PLOT_PX / total_s
    names = sorted({call.document for call in calls})
    hues = {name: 360 * at // len(names) for at, name in enumerate(names)}
    height = _ROW_PX * len(rows) + _AXIS_PX
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_NAMES_PX + _PLOT_PX + 20}" '
            f'height="{height}" font-family="sans-serif" font-size="12">'
        ),
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for at, (model, own) in enumerate(rows.items()):
        top = at * _ROW_PX + (_ROW_PX - _BAR_PX) / 2
        parts.append(f'<text x="8" y="{top + 13}">{escape(model)}</text>')
        for call in own:
            left, width = _NAMES_PX + call.start_s * scale, (call.end_s - call.start_s) * scale
            told = f"{call.document}: {call.step}, {call.end_s - call.start_s:.2f} s"
            parts.append(
                f'<rect x="{left:.1f}" y="{top}" width="{max(width, 1):.1f}" height="{_BAR_PX}" '
                f'fill="hsl({hues[call.document]} 70% 50%)" fill-opacity="0.45">'
                f"<title>{escape(told)}</title></rect>"
            )
    for tick in range(_TICKS + 1):
        left = _NAMES_PX + _PLOT_PX * tick / _TICKS
        parts.append(
            f'<line x1="{left}" x2="{left}" y1="0" y2="{height - _AXIS_PX}" stroke="#ddd"/>'
            f'<text x="{left}" y="{height - 8}" text-anchor="middle">'
            f"{total_s * tick / _TICKS:.1f} s</text>"
        )
    return "\n".join([*parts, "</svg>\n"])


def as_text(calls: Sequence[Call], columns: int = 60) -> str:
    """A line for each model; a digit is how many of its calls waited or ran then."""
    total_s = max((call.end_s for call in calls), default=0.0) or 1.0
    lines = []
    for model, own in _rows(calls).items():
        counts = [0] * columns
        for call in own:
            last = min(columns - 1, int(call.end_s / total_s * columns))
            for column in range(int(call.start_s / total_s * columns), last + 1):
                counts[column] += 1
        marks = "".join("." if n == 0 else str(n) if n < 10 else "+" for n in counts)
        lines.append(f"{model:24} {marks} {len(own):4} calls")
    return "\n".join([*lines, f"{'':24} 0 s{total_s:>{columns - 5}.1f} s"])
