"""Whether names match the regular expressions of a config that comes from elsewhere.

`re` goes back over a name for every way to read a pattern, which for some patterns takes years.
Here all ways are followed at once (Thompson 1968): a part of a pattern takes the set of places
where it may begin to the set of places where it may end. Owns the expressions that names are
described with, and the steps that one config may take. What depends on the way that was taken
(references to groups, atomic groups) and what looks back is refused by its name. Does not own what
a pattern is for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

# About a second or two.
MAX_STEPS = 4_000_000

_UNIT = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_TIMES = re.compile(r"(?:[*+?]|\{(?P<least>\d*)(?P<comma>,?)(?P<most>\d*)(?<!\{)\})(?P<how>[?+]?)")
_GROUP = re.compile(r"\((?:\?(?:P<\w+>|[:=!])|(?!\?))")
_CLASSES = frozenset(rf"\{letter}" for letter in "dDsSwWnrtfva")
_SHORT = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_SHOWN = 80


class Refused(ValueError):
    """What is wrong with a pattern."""


class Patterns:
    """The patterns of one config, which may take so many steps together."""

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self._max_steps = max_steps
        self._steps = 0
        self._read: dict[str, _Ends] = {}
        self._name = _Name("", self)

    def spend(self, steps: int) -> None:
        """Counts work. Raises `Refused` where it is too much."""
        self._steps += steps
        if self._steps > self._max_steps:
            raise Refused(f"its patterns take more than {self._max_steps} steps to compare")

    def whole(self, pattern: str, name: str) -> bool:
        """Whether a pattern is all of a name. Raises `Refused`."""
        return self._matches(pattern, name, 1)

    def ending(self, pattern: str, name: str) -> bool:
        """Whether a pattern is all of a name, or all behind a dot of it. Raises `Refused`."""
        return self._matches(pattern, name, 1 | self._of(name).begins(".") << 1)

    def _matches(self, pattern: str, name: str, starts: int) -> bool:
        ends = self._read.get(pattern)
        try:
            if ends is None:
                self.spend(200 + 20 * len(pattern))  # what reading it takes, in steps
                re.compile(pattern)
                ends = self._read[pattern] = _Reader(pattern).choice()
            return bool(ends(self._of(name), starts) >> len(name) & 1)
        except (re.error, OverflowError, RecursionError) as error:
            raise Refused(f"{pattern[:_SHOWN]!r} is no pattern: {error}") from error

    def _of(self, name: str) -> _Name:
        if self._name.text != name:
            self._name = _Name(name, self)
        return self._name


class _Name:
    """A name. A set of places in it is a number, with a bit for each place."""

    def __init__(self, text: str, patterns: Patterns) -> None:
        self.text = text
        self.spend = patterns.spend
        self.spend(len(text))
        self.step = 1 + len(text) // 256
        self._letters = frozenset(text)
        self._runs: dict[str, int] = {}
        self._units: dict[re.Pattern[str], int] = {}

    def begins(self, run: str) -> int:
        """Where a run of letters begins."""
        found = self._runs.get(run)
        if found is None:
            found, at = 0, self.text.find(run)
            while at >= 0:
                self.spend(1 + (len(run) + len(self.text)) // 64)
                found |= 1 << at
                at = self.text.find(run, at + 1)
            self._runs[run] = found
        return found

    def has(self, unit: re.Pattern[str]) -> int:
        """Where a letter of a kind stands."""
        found = self._units.get(unit)
        if found is None:
            self.spend(len(self._letters))
            found = 0
            for letter in self._letters:
                if unit.match(letter):
                    found |= self.begins(letter)
            self._units[unit] = found
        return found


_Ends = Callable[[_Name, int], int]


class _Reader:
    """Reads a pattern that `re` takes."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def choice(self) -> _Ends:
        """What stands between `|`."""
        branches = [self._sequence()]
        while self._pattern.startswith("|", self._at):
            self._at += 1
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else _either(branches)

    def _sequence(self) -> _Ends:
        parts: list[_Ends] = []
        run = ""
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            part = self._part()
            times = self._times()
            if isinstance(part, str) and times is None:
                run += part
                continue
            if run:
                parts.append(_run(run))
                run = ""
            ends = _run(part) if isinstance(part, str) else part
            parts.append(ends if times is None else _repeated(ends, *times))
        return _one_by_one([*parts, _run(run)] if run else parts)

    def _part(self) -> _Ends | str:
        """A group, an end, a kind of letters, or one letter."""
        if self._pattern[self._at] == "(":
            return self._group()
        unit = _UNIT.match(self._pattern, self._at)
        text = unit[0] if unit else ""
        self._at += len(text)
        if text in _PLACES:
            return _PLACES[text]
        if text in _CLASSES or text == "." or text.startswith("["):
            return _kind(re.compile(text))
        if text.startswith("\\"):
            if text[1].isalnum():
                raise self._refused(text)
            return text[1]
        return text

    def _group(self) -> _Ends:
        opened = _GROUP.match(self._pattern, self._at)
        if opened is None:
            raise self._refused(self._pattern[self._at : self._at + 4])
        self._at = opened.end()
        inner = self.choice()
        self._at += 1
        if opened[0] in ("(?=", "(?!"):
            return _ahead(inner, is_wanted=opened[0] == "(?=")
        return inner

    def _times(self) -> tuple[int, int | None] | None:
        """How often the part before may come, from least to most; None: once."""
        found = _TIMES.match(self._pattern, self._at)
        if found is None:
            return None
        self._at = found.end()
        if found["how"] == "+":
            raise self._refused(found[0])
        if found["least"] is None:
            return _SHORT[found[0][0]]
        least = int(found["least"] or 0)
        most = found["most"] if found["comma"] else found["least"]
        return least, int(most) if most else None

    def _refused(self, what: str) -> Refused:
        return Refused(f"{self._pattern[:_SHOWN]!r}: {what} is not supported in patterns")


def _run(run: str) -> _Ends:
    def ends(name: _Name, starts: int) -> int:
        name.spend(name.step)
        return (starts & name.begins(run)) << len(run)

    return ends


def _kind(unit: re.Pattern[str]) -> _Ends:
    def ends(name: _Name, starts: int) -> int:
        name.spend(name.step)
        return (starts & name.has(unit)) << 1

    return ends


def _border(*, inside: bool) -> _Ends:
    letter = re.compile(r"\w")

    def ends(name: _Name, starts: int) -> int:
        name.spend(name.step)
        after = name.has(letter)
        borders = after ^ (after << 1)
        return starts & ~borders if inside else starts & borders

    return ends


def _ahead(inner: _Ends, *, is_wanted: bool) -> _Ends:
    def ends(name: _Name, starts: int) -> int:
        found = 0
        while starts:
            name.spend(name.step)
            start = starts & -starts
            starts ^= start
            if bool(inner(name, start)) == is_wanted:
                found |= start
        return found

    return ends


def _one_by_one(parts: Sequence[_Ends]) -> _Ends:
    def ends(name: _Name, starts: int) -> int:
        for part in parts:
            if not starts:
                break
            starts = part(name, starts)
        return starts

    return ends


def _either(branches: Sequence[_Ends]) -> _Ends:
    def ends(name: _Name, starts: int) -> int:
        found = 0
        for branch in branches:
            name.spend(name.step)
            found |= branch(name, starts)
        return found

    return ends


def _repeated(part: _Ends, least: int, most: int | None) -> _Ends:
    def ends(name: _Name, starts: int) -> int:
        # Whoever repeats more often than a name is long has stood still, and may do so again.
        for _ in range(min(least, 2 * len(name.text) + 2)):
            name.spend(name.step)
            starts = part(name, starts)
        reached = latest = starts
        count = least
        while latest and (most is None or count < most):
            name.spend(name.step)
            latest = part(name, latest) & ~reached
            reached |= latest
            count += 1
        return reached

    return ends


_PLACES: Mapping[str, _Ends] = {
    "^": lambda _, starts: starts & 1,
    r"\A": lambda _, starts: starts & 1,
    "$": lambda name, starts: starts & (1 << len(name.text)),
    r"\Z": lambda name, starts: starts & (1 << len(name.text)),
    r"\b": _border(inside=False),
    r"\B": _border(inside=True),
}
