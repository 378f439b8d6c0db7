"""Paragraphs of a document: from lines and the layout of its pages, or from plain text.

Owns joining lines. Does not own reading them (the models).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from shoal.wire.records import Page, Region, TextBox


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A stretch of a document. heading: it is a title, and says nothing by itself."""

    text: str
    heading: bool


def from_pages(read: Iterable[Page], laid_out: Iterable[Page]) -> list[Paragraph]:
    """Lines that stand in one region are a paragraph; so are neighbours that stand in none.

    read: pages with lines. laid_out: the same pages with regions.
    """
    found = []
    for page, layout in zip(read, laid_out, strict=True):
        regions = sorted(layout.regions, key=lambda region: -region.score)
        for region, lines in groupby(page.lines, lambda line: _region(line, regions)):  # noqa: B023
            text = " ".join(line.text for line in lines)
            found.append(Paragraph(text, heading=region is not None and region.label == "title"))
    return found


def from_text(text: str) -> list[Paragraph]:
    """Paragraphs are apart by a blank line; one in capitals is a heading."""
    blocks = (" ".join(block.split()) for block in text.split("\n\n"))
    return [Paragraph(block, block.isupper()) for block in blocks if block]


def _region(line: TextBox, regions: list[Region]) -> Region | None:
    """The surest region that has the middle of the line."""
    x = sum(x for x, _ in line.box) / len(line.box)
    y = sum(y for _, y in line.box) / len(line.box)
    for region in regions:
        left, top, right, bottom = region.box
        if left <= x <= right and top <= y <= bottom:
            return region
    return None
