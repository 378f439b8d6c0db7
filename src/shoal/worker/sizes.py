"""How much memory models take and how long they load, as measured here, kept across restarts.

Owns the averages per (model, runtime, kind of device); `shoal plan --measured` reads their file.
Does not own measuring (the runtime process) or what the numbers are used for (`residency`).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from shoal.catalog.estimate import memory_mib
from shoal.catalog.schema import Entry
from shoal.worker.book import read_book, write_book

MAX_KEPT = 1_000
_SMOOTHING = 0.5
_GUESSED_LOAD_S = 1.0
_TOO_SMALL = 1.3
_MIB = 1024 * 1024


class Measured(msgspec.Struct):
    """Moving averages of one model's loads."""

    size_bytes: int
    load_s: float


class SizeBook:
    """What loads have shown. `hardware` names what they were measured on."""

    def __init__(self, file: Path, hardware: str) -> None:
        self._file = file
        self._hardware = hardware
        self._kept = read_book(file, Measured)
        self._corrections: dict[str, int] = {}
        self._guesses: dict[str, int] = {}

    def _key(self, entry: Entry) -> str:
        return f"{entry.key} {entry.runtime} {self._hardware}"

    def measured(self, entry: Entry) -> Measured | None:
        """What loads of the model have shown; None before the first."""
        return self._kept.get(self._key(entry))

    def size_bytes(self, entry: Entry) -> int:
        """The memory of one copy: measured, else the entry's estimate.

        After a load that did not fit it is more than that.
        """
        seen = self.measured(entry)
        size_bytes = seen.size_bytes if seen else self._guess_bytes(entry)
        return max(size_bytes, self._corrections.get(self._key(entry), 0))

    def _guess_bytes(self, entry: Entry) -> int:
        key = self._key(entry)
        if key not in self._guesses:  # it looks at files
            self._guesses[key] = memory_mib(entry) * _MIB
        return self._guesses[key]

    def is_corrected(self, entry: Entry) -> bool:
        """Whether the size is a guess after a load that did not fit."""
        return self._key(entry) in self._corrections

    def load_s(self, entry: Entry) -> float:
        """What a load takes."""
        seen = self.measured(entry)
        return seen.load_s if seen else _GUESSED_LOAD_S

    def on_loaded(self, entry: Entry, size_bytes: int, load_s: float) -> None:
        """A load was measured."""
        key, seen = self._key(entry), self.measured(entry)
        self._corrections.pop(key, None)
        self._guesses.pop(key, None)
        if seen is not None:
            size_bytes = round(seen.size_bytes + _SMOOTHING * (size_bytes - seen.size_bytes))
            load_s = seen.load_s + _SMOOTHING * (load_s - seen.load_s)
        self._kept.pop(key, None)  # what is in use goes to the end: the oldest is the first
        self._kept[key] = Measured(size_bytes, load_s)

    def on_out_of_memory(self, entry: Entry) -> None:
        """It needs more than was thought: the next plan makes more room for it."""
        self._corrections[self._key(entry)] = int(self.size_bytes(entry) * _TOO_SMALL)

    def on_given_up(self, entry: Entry) -> None:
        """Forgets what failed loads made of the size: they may have failed by what was beside."""
        self._corrections.pop(self._key(entry), None)

    def save(self) -> None:
        """Writes the file."""
        write_book(self._file, self._kept, MAX_KEPT)
