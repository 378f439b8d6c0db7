"""What a server's generated texts become: whole, or read from events as they grow.

Owns reading both. Does not own what is asked (`core`) or the connection (`growing`). Sans-io.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from shoal.client.exchange import Reply, error_of
from shoal.errors import Bug, PayloadTooLarge, Unreachable

# No event of a server is longer; more without an end is something else.
MAX_EVENT_BYTES = 4 * 2**20
_DATA = b"data:"


@dataclass(frozen=True, slots=True)
class Generated:
    """A text that a model has generated.

    finish_reason: `stop` at its own end or at a stop text, `length` at `max_tokens` or at the end
    of the context. tokens: generated. prompt_tokens: read, for all texts of the call.
    """

    text: str
    finish_reason: str
    tokens: int
    prompt_tokens: int


class _Numbers(msgspec.Struct):
    """What stands of a text beside it. text: empty where it was sent before."""

    finish_reason: str
    tokens: int
    text: str = ""


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Generated(msgspec.Struct):
    data: list[_Numbers]
    usage: _Usage


class _Event(msgspec.Struct):
    """A part of the text, the numbers at its end, or an error."""

    text: str = ""
    data: list[_Numbers] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_event = msgspec.json.Decoder(_Event).decode


def whole(reply: Reply) -> list[Generated]:
    """The text that continues each prompt."""
    told = msgspec.msgpack.decode(reply.content, type=_Generated)
    return [_made(one.text, one, told.usage) for one in told.data]


def first(reply: Reply) -> Generated:
    """The one text that was asked for."""
    return whole(reply)[0]


def _made(text: str, numbers: _Numbers, usage: _Usage) -> Generated:
    return Generated(text, numbers.finish_reason, numbers.tokens, usage.prompt_tokens)


class Reading:
    """One text, from the bytes of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self._parts: list[str] = []
        self._generated: Generated | None = None

    @property
    def generated(self) -> Generated:
        """The whole text. Raises `Bug` before its end."""
        if self._generated is None:
            raise Bug("the text has not come to its end")
        return self._generated

    def feed(self, data: bytes) -> Iterator[str]:
        """The parts of the text in some bytes. Raises the error that an event tells of."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise PayloadTooLarge("an event of the answer has no end")
        for line in lines:
            part = self._line(line.strip())
            if part:
                yield part

    def _line(self, line: bytes) -> str:
        if not line.startswith(_DATA):
            return ""  # a comment, an empty line, a name of an event
        data = line[len(_DATA) :].strip()
        try:
            event = _event(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Bug(f"an event of the answer cannot be read: {error}") from error
        if event.error is not None:
            raise error_of(Reply(200, {}, data))
        self._parts.append(event.text)
        if event.data and event.usage is not None:
            self._generated = _made("".join(self._parts), event.data[0], event.usage)
        return event.text

    def end(self) -> None:
        """There are no more bytes. Raises `Unreachable` where the text has not ended."""
        if self._generated is None:
            raise Unreachable("the answer ended before the text did")
