"""The picture of a plan: which model was in memory when, as an SVG.

Owns the drawing. Does not own what is drawn (`shoal.sim.residency`).
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from shoal.sim.residency import Report
from shoal.sim.workload import SimModel

_ROW_PX, _NAMES_PX, _WIDTH_PX = 18, 220, 900
_COLOURS = ("#2a6f97", "#e07a5f", "#3d8b5f", "#8d6a9f", "#b08d2f", "#5b6770")


def picture(models: Sequence[SimModel], report: Report) -> str:
    """An SVG with a row for each model and a bar for each stay in memory, coloured by device."""
    order = sorted(models, key=lambda m: (-report.resident_share(m.model), m.model))
    rows = {model.model: number for number, model in enumerate(order)}
    devices = sorted({stay.device for stay in report.stays})
    scale = (_WIDTH_PX - _NAMES_PX) / max(report.end_s, 1e-9)
    height = _ROW_PX * (len(rows) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH_PX}" height="{height}">',
        "<style>text { font: 11px sans-serif }</style>",
        f'<rect width="{_WIDTH_PX}" height="{height}" fill="white"/>',
    ]
    for number, device in enumerate(devices):
        colour, left = _COLOURS[number % len(_COLOURS)], _NAMES_PX + 130.0 * number
        parts.append(f'<rect x="{left}" y="4" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{left + 14}" y="13">{escape(device)}</text>')
    for model, row in rows.items():
        bottom = _ROW_PX * (row + 2) - 5
        parts.append(f'<text x="4" y="{bottom}">{escape(model[:34])}</text>')
    for stay in report.stays:
        left, top = _NAMES_PX + scale * stay.from_s, _ROW_PX * (rows[stay.model] + 1) + 3
        width = max(0.5, scale * (stay.to_s - stay.from_s))
        colour = _COLOURS[devices.index(stay.device) % len(_COLOURS)]
        parts.append(
            f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_ROW_PX - 6}" '
            f'fill="{colour}"><title>{escape(stay.model)}: {stay.from_s:.1f} to {stay.to_s:.1f} s'
            "</title></rect>"
        )
    foot = height - 5
    parts.append(f'<text x="{_NAMES_PX}" y="{foot}">0 s</text>')
    parts.append(f'<text x="{_WIDTH_PX}" y="{foot}" text-anchor="end">{report.end_s:.0f} s</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
