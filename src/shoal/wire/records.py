"""What `extract` and `transcribe` find in one input, as structures.

Owns the structs and their codec; a `Result` carries one for each input, encoded. Does not own how
anything is found, or the HTTP shape of an answer.

Offsets count characters (Unicode code points) of the original text, the end exclusive. Boxes are
in pixels of the image as it was sent, x to the right and y downwards. Scores are 0 to 1. Times are
seconds from the beginning.
"""

from __future__ import annotations

import msgspec

from shoal.wire.envelope import UnreadableMessage

Point = tuple[float, float]


class Entity(msgspec.Struct, frozen=True):
    """A stretch of text with a label."""

    label: str
    start: int
    end: int
    score: float


class TextBox(msgspec.Struct, frozen=True):
    """A line of text on a page; its corners clockwise from the upper left."""

    text: str
    box: list[Point]
    score: float


class Region(msgspec.Struct, frozen=True):
    """A part of a page: `box` is left, top, right, bottom."""

    label: str
    box: tuple[float, float, float, float]
    score: float


class Page(msgspec.Struct, frozen=True, omit_defaults=True):
    """One page of a document, or one image. lines: in reading order."""

    width: int
    height: int
    lines: list[TextBox] = []
    regions: list[Region] = []


class Segment(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stretch of sound: speech, with its words where they were recognised."""

    start_s: float
    end_s: float
    text: str = ""


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was found in one input; only the fields of the outputs that were asked for are filled.

    text: a transcript. language: of the speech, as ISO 639-1. duration_s: of the sound.
    """

    entities: list[Entity] = []
    pages: list[Page] = []
    segments: list[Segment] = []
    text: str = ""
    language: str = ""
    duration_s: float = 0.0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


def pack(record: Record) -> msgspec.Raw:
    """A record as it stands in a `Result`."""
    return msgspec.Raw(_encode(record))


def unpack(data: msgspec.Raw) -> Record:
    """The record again. Raises `UnreadableMessage`."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableMessage(f"record: {error}") from error
