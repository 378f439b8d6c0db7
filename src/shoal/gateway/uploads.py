"""Bodies that are files: the file itself with the other fields in the query, or a form.

Owns reading both into the very struct that the route has for JSON. Does not own which routes take
files (`routes`), what a file may be (`files`) or JSON and MessagePack (`forms`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from shoal.errors import InvalidRequest, UnsupportedMedia
from shoal.gateway.files import File
from shoal.gateway.forms import Reader, sent_form

MAX_PARTS: Final = 2_100
MAX_QUERY_FIELDS: Final = 64
# What a body may be announced as when it is a file. What it really is, its first bytes say.
RAW_TYPES: Final = ("application/octet-stream", "application/pdf", "image/*", "audio/*")
MULTIPART: Final = "multipart/form-data"
_RAW = re.compile(
    r"application/(octet-stream|pdf|ogg)|image/[\w.+-]+|audio/[\w.+-]+|video/(mp4|webm)"
)

# The parser would warn of every caller's mistake, which its caller is told of anyway.
_UNHEARD: Final = logging.Logger(__name__, logging.CRITICAL)  # noqa: LOG001 nobody may turn it up

S = TypeVar("S", bound=msgspec.Struct)
Pairs = Iterable[tuple[str, str | File]]


def reading(
    content_type: bytes | None, query: bytes, reader: Reader[S], field: str | None
) -> Callable[[bytes], S]:
    """How a body of that type is read. Raises `UnsupportedMedia` before it has been received.

    field: where the route has its file; None where it takes none.
    """
    try:
        form = sent_form(content_type)
    except UnsupportedMedia as error:
        if field is None:
            raise
        return _of_file(content_type or b"", query, reader, field, error)
    return lambda body: reader.read(body, form)


def _of_file(
    content_type: bytes, query: bytes, reader: Reader[S], field: str, error: UnsupportedMedia
) -> Callable[[bytes], S]:
    """As `reading`, for what is neither JSON nor MessagePack. error: the refusal of it."""
    sent = content_type[:512].decode("latin-1")
    name = sent.partition(";")[0].strip().lower()
    if _RAW.fullmatch(name):
        return lambda body: _converted(reader, [*_query(query), (field, File(body))])
    if name != MULTIPART:
        also = ", ".join((*RAW_TYPES, MULTIPART))
        raise UnsupportedMedia(f"{error.message}; for files: {also}", param=error.param) from error
    boundary = parse_options_header(sent)[1].get(b"boundary", b"")
    if not 0 < len(boundary) <= 70:
        raise UnsupportedMedia(f"{MULTIPART} needs a boundary", param="Content-Type") from error
    return lambda body: _converted(reader, _parts(body, boundary))


def _query(query: bytes) -> Pairs:
    try:
        return parse_qsl(
            query.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MAX_QUERY_FIELDS,
        )
    except ValueError as error:  # a wrong escape is one, too
        raise InvalidRequest(f"the query cannot be read: {error}") from error


def _converted(reader: Reader[S], pairs: Pairs) -> S:
    """The route's struct of named values; a field that holds a list may come several times."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in reader.lists:
            values = value.split(",") if isinstance(value, str) else [value]
            fields[name] = [*fields.get(name, []), *values]
        elif name in fields and isinstance(value, File):
            before = fields[name]
            fields[name] = [*(before if isinstance(before, list) else [before]), value]
        elif name in fields:
            raise InvalidRequest(f"`{name[:100]}` is there twice", param=name[:100])
        else:
            fields[name] = value
    return reader.convert(fields)


class _Part:
    """A part of a form, as it has been read so far."""

    def __init__(self) -> None:
        self.disposition = b""
        self.data: list[bytes] = []

    def pair(self) -> tuple[str, str | File]:
        """Its name, and its file or text. A part with a file name is a file."""
        options = parse_options_header(self.disposition)[1]
        name, data = options.get(b"name", b"").decode("utf-8"), b"".join(self.data)
        return name, File(data) if b"filename" in options else data.decode("utf-8")


class _Form:
    """The parts of a form; the methods are the parser's callbacks."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.ended = False
        self._header = b""
        self._value = b""

    def on_part_begin(self) -> None:
        if len(self.parts) >= MAX_PARTS:
            raise FormParserError(f"more than {MAX_PARTS} parts")
        self.parts.append(_Part())

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self.parts[-1].disposition = self._value
        self._header = self._value = b""

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        self.parts[-1].data.append(data[start:end])

    def on_end(self) -> None:
        self.ended = True


def _parts(body: bytes, boundary: bytes) -> Pairs:
    form = _Form()
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": form.on_part_begin,
            "on_header_field": form.on_header_field,
            "on_header_value": form.on_header_value,
            "on_header_end": form.on_header_end,
            "on_part_data": form.on_part_data,
            "on_end": form.on_end,
        },
        max_size=max(1, len(body)),
    )
    parser.logger = _UNHEARD
    try:
        parser.write(body)
        pairs = [part.pair() for part in form.parts]
    except (FormParserError, UnicodeDecodeError) as error:
        raise _no_form(str(error)[:200]) from error
    if not form.ended:
        raise _no_form("it ends before its last boundary")
    return pairs


def _no_form(why: str) -> InvalidRequest:
    return InvalidRequest(f"the body is no {MULTIPART}: {why}")
