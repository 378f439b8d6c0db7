"""`shoal dead list|show|drop`: dead letters found, shown and forgotten.

Owns the filters and the looks. What clients sent is printed without
its control characters, so that a text cannot steer the terminal of the one who reads it. Does not
own replaying (`replay`) or the store (`shoal.queue.deadletters`).
"""

from __future__ import annotations

import asyncio
import base64
import re
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

import msgspec
import typer
from msgspec import structs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal import clock
from shoal.cli.reach import Reach, opened
from shoal.errors import NotFound, QueueUnavailable, SettingsError
from shoal.queue.interface import Buried, Queue
from shoal.wire.envelope import (
    EMPTY,
    DeadLetter,
    Envelope,
    Inputs,
    UnreadableMessage,
    decode_envelope,
    decode_inputs,
)

PAGE = 200
SHOWN_BYTES = 512
TABLE_WIDTH = 200
_AGES = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


@dataclass(frozen=True, slots=True)
class Filters:
    """Which letters are meant. since_s, until_s: wall-clock seconds of their burial."""

    model: str | None = None
    code: str | None = None
    since_s: float | None = None
    until_s: float | None = None

    @classmethod
    def of(cls, model: str | None, code: str | None, since: str | None, until: str | None) -> Self:
        """From a command's options. Raises `SettingsError`."""
        now_s = clock.wall()
        return cls(model, code, _moment("--since", since, now_s), _moment("--until", until, now_s))

    @property
    def any(self) -> bool:
        """Whether they leave anything out."""
        return self != Filters()

    def take(self, letter: DeadLetter) -> bool:
        """Whether a letter is meant."""
        return (
            self.model in (None, letter.model)
            and self.code in (None, letter.cause.code)
            and (self.since_s is None or letter.buried_s >= self.since_s)
            and (self.until_s is None or letter.buried_s <= self.until_s)
        )


def _moment(option: str, text: str | None, now_s: float) -> float | None:
    """Wall-clock seconds of `1h` (ago) or of a date in ISO form, local where it names no zone."""
    if text is None:
        return None
    age = _AGE.fullmatch(text)
    if age is not None:
        return now_s - float(age[1]) * _AGES[age[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        raise SettingsError(
            f"{option}: `{plain(text)}` is neither an age (90s, 15m, 1h, 2d) nor a date"
        ) from error


async def each_letter(queue: Queue) -> AsyncIterator[Buried]:
    """All letters, in the order of their numbers, a page at a time."""
    first = 0
    while page := await queue.dead.read(first, PAGE):
        for found in page:
            yield found
        first = page[-1].number + 1


async def select(
    queue: Queue, wanted: Sequence[int] | Filters, limit: int | None
) -> tuple[list[Buried], int]:
    """The letters that are meant, at most the latest `limit`, and how many there are in all.

    Raises `NotFound` for a number that is not there.
    """
    if not isinstance(wanted, Filters):
        named = [await one_letter(queue, number) for number in dict.fromkeys(wanted)]
        return named, len(named)
    latest: deque[Buried] = deque(maxlen=limit or sys.maxsize)
    count = 0
    async for found in each_letter(queue):
        if wanted.take(found.letter):
            latest.append(found)
            count += 1
    return list(latest), count


async def one_letter(queue: Queue, number: int) -> Buried:
    """The letter of a number. Raises `NotFound`."""
    found = await queue.dead.read(number, 1)
    if not found or found[0].number != number:
        raise NotFound(f"there is no dead letter {number}")
    return found[0]


def envelope_of(letter: DeadLetter) -> Envelope:
    """What was sent. Raises `UnreadableMessage`."""
    return decode_envelope(letter.envelope)


async def inputs_of(queue: Queue, letter: DeadLetter, envelope: Envelope) -> Inputs:
    """The inputs, wherever they lie. Raises `UnreadableMessage` where they are lost."""
    body = letter.body or bytes(envelope.body)
    if not body and envelope.payload is not None:
        try:
            body = await queue.payloads.get(envelope.payload)
        except QueueUnavailable as error:
            raise UnreadableMessage(f"the inputs are lost: {error.message}") from error
    return decode_inputs(body)


def list_letters(reach: Reach, filters: Filters, limit: int, *, as_json: bool) -> int:
    """Prints a table, or JSON; the exit code."""

    async def work() -> None:
        async with opened(reach) as queue:
            letters, count = await select(queue, filters, limit)
            if as_json:
                rows = [await _everything(queue, found) for found in letters]
                print(_json(rows))
            elif letters:
                _print_table(letters)
        if not letters and not as_json:
            print("no dead letters match" if filters.any else "no dead letters")
        elif count > len(letters):
            typer.echo(f"the latest {len(letters)} of {count}; --limit shows more", err=True)

    asyncio.run(work())
    return 0


def show_letter(reach: Reach, number: int, *, as_json: bool) -> int:
    """Prints one letter whole; the exit code."""

    async def work() -> None:
        async with opened(reach) as queue:
            row = await _everything(queue, await one_letter(queue, number))
        print(_json(row) if as_json else "\n".join(_page(row)))

    asyncio.run(work())
    return 0


def drop_letters(
    reach: Reach, wanted: Sequence[int] | Filters, limit: int | None, *, yes: bool
) -> int:
    """Forgets letters, after a question; the exit code."""

    async def work() -> None:
        async with opened(reach) as queue:
            letters, _ = await select(queue, wanted, limit)
            if letters and not yes:
                _print_table(letters)
                question = f"Drop {_count(len(letters))} for good?"
                await asyncio.to_thread(typer.confirm, question, abort=True)
            dropped = [await queue.dead.drop(found.number) for found in letters]
        print(f"dropped {_count(sum(dropped))}")

    asyncio.run(work())
    return 0


def plain(text: str) -> str:
    """A text without control characters, which are written as escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _count(number: int) -> str:
    return f"{number} dead letter{'' if number == 1 else 's'}"


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _age(seconds: float) -> str:
    for unit, length_s in reversed(_AGES.items()):
        if seconds >= length_s:
            return f"{int(seconds / length_s)}{unit}"
    return "0s"


def _print_table(letters: Sequence[Buried]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("NUMBER", "AGE", "MODEL", "TASK", "INPUTS", "ATTEMPTS", "CODE"):
        table.add_column(title, overflow="fold")
    table.add_column("MESSAGE", overflow="fold", max_width=80)
    table.add_column("WORKER", overflow="fold")
    now_s = clock.wall()
    for found in letters:
        table.add_row(*(Text(plain(cell)) for cell in _cells(found, now_s)))
    width = None if sys.stdout.isatty() else TABLE_WIDTH
    Console(highlight=False, width=width).print(table)


def _cells(found: Buried, now_s: float) -> Iterator[str]:
    letter = found.letter
    try:
        envelope = envelope_of(letter)
        task, n_inputs = str(envelope.task), str(envelope.n_inputs)
    except UnreadableMessage:
        task, n_inputs = "unreadable", ""
    yield from (str(found.number), _age(now_s - letter.buried_s), letter.model or "-", task)
    yield from (n_inputs, str(letter.attempts), letter.cause.code, letter.cause.message)
    yield letter.worker


async def _everything(queue: Queue, found: Buried) -> dict[str, Any]:
    """A letter as plain values; `unreadable` says why, where there is no envelope or no inputs."""
    letter = found.letter
    row: dict[str, Any] = {
        "number": found.number,
        "item": letter.item,
        "model": letter.model,
        "attempts": letter.attempts,
        "worker": letter.worker,
        "buried_s": letter.buried_s,
        "cause": structs.asdict(letter.cause),
        "envelope": None,
        "inputs": None,
        "unreadable": None,
    }
    try:
        envelope = envelope_of(letter)
        row["envelope"] = {
            **structs.asdict(structs.replace(envelope, body=EMPTY)),
            "params": structs.asdict(envelope.params),
        }
        del row["envelope"]["body"]
        row["inputs"] = structs.asdict(await inputs_of(queue, letter, envelope))
    except UnreadableMessage as error:
        row["unreadable"] = str(error)
        row["bytes"] = base64.b64encode(letter.envelope).decode()
    return row


def _page(row: dict[str, Any]) -> Iterator[str]:
    """The lines that tell a person of a letter."""
    buried_s, cause = row["buried_s"], row["cause"]
    when = datetime.fromtimestamp(buried_s, UTC).isoformat(timespec="seconds")
    yield f"dead letter {row['number']}"
    yield _line("cause", f"{cause['code']}: {cause['message']}")
    if cause["param"]:
        yield _line("at", cause["param"])
    yield _line("buried", f"{when}, {_age(clock.wall() - buried_s)} ago")
    yield _line("by worker", row["worker"])
    yield _line("attempts", row["attempts"])
    if row["envelope"] is not None:
        envelope = dict(row["envelope"])
        params = envelope.pop("params")
        for name, value in envelope.items():
            if value is not None:
                yield _line(name, value)
        yield "params"
        for name, value in params.items():
            yield _line(name, value)
    if row["inputs"] is not None:
        yield "inputs"
        yield from _inputs(row["inputs"])
    else:
        data = base64.b64decode(row["bytes"])
        yield _line("unreadable", row["unreadable"])
        yield f"the first {min(SHOWN_BYTES, len(data))} of {len(data)} bytes"
        for at in range(0, min(SHOWN_BYTES, len(data)), 16):
            part = data[at : at + 16]
            text = "".join(chr(b) if 32 <= b < 127 else "." for b in part)
            yield f"  {at:04x}  {part.hex(' '):<47}  {text}"


def _inputs(inputs: dict[str, Any]) -> Iterator[str]:
    if inputs["query"] is not None:
        yield _line("query", inputs["query"])
    firsts = inputs["firsts"]
    for index, value in enumerate(inputs["texts"] or inputs["ids"]):
        if firsts:
            yield _line(f"[{index}][0]", firsts[index])
        yield _line(f"[{index}][1]" if firsts else f"[{index}]", value)


def _line(name: str, value: object) -> str:
    return f"  {name:<13} {plain(str(value))}"
