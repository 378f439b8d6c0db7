"""What the null runtime finds in an input: records that depend on nothing but its bytes.

Owns those records, so that all that carries them can be tested without a model. Does not own the
numbers of the other tasks (`null`), and finds nothing that means anything.

A text has one entity, its longest word; an image or document is one page with one line and one
region; a sound is one stretch of speech; a transcript says what the checksum of its sound is.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from shoal.wire.envelope import Params
from shoal.wire.records import Entity, Page, Record, Region, Segment, TextBox

LABELS = ("even", "odd")
_BYTES_PER_S = 32_000
_SIDE_PIXELS = 1_000


def record(given: str | bytes, wanted: Sequence[str], params: Params) -> Record:
    """The record of one input. wanted: the outputs of `extract`, or `transcript`."""
    data = given.encode() if isinstance(given, str) else given
    checksum = zlib.crc32(data)
    label, score = LABELS[checksum % 2], checksum / 2**32
    keep = label in (params.labels or LABELS) and score >= (params.threshold or 0.0)
    told = f"heard {checksum:08x}"
    lasts_s = len(data) / _BYTES_PER_S
    sound = "speech" in wanted or "transcript" in wanted
    return Record(
        entities=[_entity(given, label, score)]
        if keep and "entities" in wanted and isinstance(given, str)
        else [],
        pages=[_page(checksum, label, score, wanted, keep=keep)]
        if "text" in wanted or "layout" in wanted
        else [],
        segments=[Segment(0.0, lasts_s, told if "transcript" in wanted else "")] if sound else [],
        text=told if "transcript" in wanted else "",
        language=(params.language or "en") if "transcript" in wanted else "",
        duration_s=lasts_s if sound else 0.0,
    )


def _entity(text: str, label: str, score: float) -> Entity:
    word = max(text.split() or [text], key=len)
    start = text.index(word)
    return Entity(label, start, start + len(word), score)


def _page(checksum: int, label: str, score: float, wanted: Sequence[str], *, keep: bool) -> Page:
    side = 1 + checksum % _SIDE_PIXELS
    corners = [(0.0, 0.0), (float(side), 0.0), (float(side), 9.0), (0.0, 9.0)]
    line = TextBox(f"{checksum:08x}", corners, score)
    region = Region(label, (0.0, 0.0, float(side), 9.0), score)
    return Page(
        side,
        side,
        [line] if "text" in wanted else [],
        [region] if keep and "layout" in wanted else [],
    )
