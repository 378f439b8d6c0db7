"""Pairs of texts to learn from: reading them from a file, and keeping some apart.

Owns the forms of the file (JSON lines, CSV, TSV), the faults of its rows, each named by file and
line, and the split into pairs to train on and pairs to measure with. Does not own how many tokens
a text may have (`lengths`) or what is learnt.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.errors import OperatorError

MAX_FILE_BYTES = 256 * 2**20
MAX_PAIRS = 100_000
MAX_TEXT_CHARS = 65_536  # some tokenizers take seconds for one long word
MAX_HELD_OUT = 2_000  # each is compared with every other
LEAST_TRAINED = 16
LEAST_HELD_OUT = 8
_SHOWN_FAULTS = 10
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
COLUMNS = ("anchor", "positive", "negative")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts that belong together, texts that look so and do not, and the line they are on."""

    anchor: str
    positive: str
    negatives: tuple[str, ...] = ()
    line: int = 0

    @property
    def texts(self) -> tuple[str, ...]:
        """All of its texts."""
        return (self.anchor, self.positive, *self.negatives)


@dataclass(frozen=True, slots=True)
class Split:
    """Pairs to train on and pairs to measure with; no text is in both."""

    trained: list[Pair]
    held_out: list[Pair]


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong on one line, counted from 1."""

    line: int
    what: str


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a JSON lines file."""

    anchor: str
    positive: str
    negative: str | list[str] = []


def read(path: Path) -> list[Pair]:
    """The pairs of a file. Raises `OperatorError` that names the lines at fault."""
    text = _text(path)
    if path.suffix == ".jsonl":
        rows = _json_rows(text)
    elif path.suffix in _DELIMITERS:
        rows = _table_rows(text, _DELIMITERS[path.suffix])
    else:
        raise OperatorError(f"{path}: its name must end in .jsonl, .csv or .tsv")
    pairs: list[Pair] = []
    faults: list[Fault] = []
    first_lines: dict[tuple[str, ...], int] = {}
    for row in rows:
        if isinstance(row, Fault):
            faults.append(row)
            continue
        found = list(_faults(row))
        before = first_lines.setdefault(row.texts, row.line)
        if before != row.line:
            found.append(Fault(row.line, f"the same pair as on line {before}"))
        faults += found
        pairs.append(row)
        if len(pairs) > MAX_PAIRS:
            raise OperatorError(f"{path}:{row.line}: more than {MAX_PAIRS} pairs")
    refuse(path, faults)
    return pairs


def refuse(path: Path, faults: Sequence[Fault]) -> None:
    """Raises `OperatorError` with the first of the faults, if there are any."""
    if not faults:
        return
    told = [f"{path}:{fault.line}: {fault.what}" for fault in faults[:_SHOWN_FAULTS]]
    if len(faults) > _SHOWN_FAULTS:
        told.append(f"and {len(faults) - _SHOWN_FAULTS} faults more")
    raise OperatorError("\n".join(told))


def split(path: Path, pairs: Sequence[Pair], share: float, seed: int) -> Split:
    """Keeps about `share` of the pairs apart, at most `MAX_HELD_OUT`, the same for the same seed.

    Pairs that have a text in common, but for case and spaces, stay together: what a model was
    trained on says nothing about texts that it has not seen. Raises `OperatorError` where too few
    pairs are left on a side. path: of the file, for the message.
    """
    groups = _groups(pairs)
    random.Random(seed).shuffle(groups)  # noqa: S311 a split is no secret
    wanted = min(round(share * len(pairs)), MAX_HELD_OUT)
    held_out: list[Pair] = []
    trained: list[Pair] = []
    for group in groups:
        fits = len(held_out) + len(group) <= wanted
        (held_out if fits else trained).extend(group)
    if len(trained) < LEAST_TRAINED or len(held_out) < LEAST_HELD_OUT:
        raise OperatorError(
            f"{path}: too few pairs: of {len(pairs)}, in {len(groups)} groups without a common "
            f"text, {len(trained)} are to train on (at least {LEAST_TRAINED}) and "
            f"{len(held_out)} to measure with (at least {LEAST_HELD_OUT})"
        )
    return Split(trained, held_out)


def same(text: str) -> str:
    """A text without what does not make it another one: case and spaces."""
    return " ".join(text.casefold().split())


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise OperatorError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise OperatorError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise OperatorError(f"{path}:{line}: is not UTF-8") from error


def _json_rows(text: str) -> Iterator[Pair | Fault]:
    decoder = msgspec.json.Decoder(_Row)
    # Not splitlines: JSON's strings may have other separators of lines in them.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            yield Fault(number, f"is no object of `anchor`, `positive`, `negative`: {error}")
            continue
        negatives = [row.negative] if isinstance(row.negative, str) else row.negative
        yield Pair(row.anchor, row.positive, tuple(negatives), number)


def _table_rows(text: str, delimiter: str) -> Iterator[Pair | Fault]:
    lines = text.replace("\r\n", "\n").split("\n")
    reader = csv.reader((line + "\n" for line in lines), delimiter=delimiter, strict=True)
    names: list[str] = []
    while True:
        line = reader.line_num + 1  # where a row begins: a quoted text may span lines
        try:
            cells = next(reader, None)
        except csv.Error as error:
            yield Fault(line, f"is no row: {error}")
            return
        if cells is None:
            return
        if not any(cells):
            continue
        if not names:
            names = [cell.strip().casefold() for cell in cells]
            fault = _header_fault(names)
            if fault:
                yield Fault(line, fault)
                return
        elif len(cells) != len(names):
            yield Fault(line, f"has {len(cells)} columns, the first line {len(names)}")
        else:
            yield _pair(names, cells, line)


def _header_fault(names: Sequence[str]) -> str | None:
    strange = [name for name in names if name not in COLUMNS]
    missing = [name for name in COLUMNS[:2] if names.count(name) != 1]
    if not strange and not missing:
        return None
    return (
        "must name the columns: one `anchor`, one `positive`, and any number of `negative`; "
        f"it has {', '.join(f'`{name[:40]}`' for name in names[:8])}"
    )


def _pair(names: Sequence[str], cells: Sequence[str], line: int) -> Pair:
    by_name = dict(zip(names, cells, strict=True))
    # A row may have fewer of them than another.
    negatives = [c for n, c in zip(names, cells, strict=True) if n == COLUMNS[2] and c]
    return Pair(by_name["anchor"], by_name["positive"], tuple(negatives), line)


def _faults(pair: Pair) -> Iterator[Fault]:
    names = ("anchor", "positive", *["negative"] * len(pair.negatives))
    for name, text in zip(names, pair.texts, strict=True):
        if not text.strip():
            yield Fault(pair.line, f"`{name}` is empty")
        elif len(text) > MAX_TEXT_CHARS:
            yield Fault(pair.line, f"`{name}` has more than {MAX_TEXT_CHARS} characters")
    if same(pair.positive) in {same(text) for text in pair.negatives}:
        yield Fault(pair.line, "`negative` is its `positive`")


def _groups(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Pairs that hang together by common texts, in the order of the file."""
    roots: dict[str, str] = {}

    def root(text: str) -> str:
        while (above := roots.setdefault(text, text)) != text:
            roots[text] = roots[above]  # halves the way for the next one
            text = above
        return text

    pairs = list(pairs)
    for pair in pairs:
        first, *others = (same(text) for text in pair.texts)
        for other in others:
            roots[root(other)] = root(first)
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(root(same(pair.anchor)), []).append(pair)
    return list(groups.values())
