"""The models that this worker knows, as the catalog says at the moment.

Owns its entries by key, the lines of those it can serve, and why it cannot serve the others. A
model whose entry was replaced or removed stays for a while, retired: its items may still be in
line. Does not own the catalog (`shoal.catalog.follow`) or what is loaded (`residency`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from shoal.catalog.schema import Entry
from shoal.core.types import Lane
from shoal.worker.lines import Line, SlotLine

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Change:
    """What a new catalog means here. gone: of which nothing is left to do."""

    added: list[Entry] = field(default_factory=list)
    changed: list[Entry] = field(default_factory=list)
    gone: list[Entry] = field(default_factory=list)


class Roster:
    """Entries and lines by key. why_not: why an entry cannot be served here, or None.

    slot_room: how many more items of a generator's lane could begin; set before any entry comes.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        *,
        devices: int,
        window_items: int,
        why_not: Callable[[Entry], str | None],
    ) -> None:
        self.entries: dict[str, Entry] = {}
        self.unservable: dict[str, str] = {}
        self.retired: set[str] = set()
        self.lines: dict[tuple[str, Lane], Line] = {}
        self._lanes = tuple(lanes)
        self._devices = devices
        self._window_items = window_items
        self._why_not = why_not
        self.slot_room: Callable[[Entry, Lane], int] = lambda _, __: 0

    def servable(self) -> list[Entry]:
        """The entries that have lines here, retired ones included."""
        return [entry for key, entry in self.entries.items() if key not in self.unservable]

    def lines_of(self, key: str) -> list[Line]:
        """The lines of a model; none where it cannot be served."""
        return [line for lane in self._lanes if (line := self.lines.get((key, lane)))]

    def follow(self, current: Iterable[Entry], retired: Iterable[Entry]) -> Change:
        """Takes a new catalog over."""
        now = {entry.key: entry for entry in current}
        old = {entry.key: entry for entry in retired if entry.key not in now}
        wanted = now | old
        change = Change(gone=[e for key, e in self.entries.items() if key not in wanted])
        for entry in change.gone:
            self._drop(entry)
        for key, entry in wanted.items():
            known = self.entries.get(key)
            if known is None:
                self._add(entry)
                change.added.append(entry)
            elif known != entry:
                self.replace(entry)
                change.changed.append(entry)
        self.retired = set(old)
        return change

    def replace(self, entry: Entry) -> None:
        """Another entry of a model that is here, under the same key."""
        self.entries[entry.key] = entry
        for line in self.lines_of(entry.key):
            line.entry = entry

    def servable_by_now(self) -> list[Entry]:
        """Those that could not be served and now can (a file has come). Safe in a thread."""
        unservable = [self.entries[key] for key in list(self.unservable) if key in self.entries]
        return [entry for entry in unservable if self._why_not(entry) is None]

    def admit(self, found: Iterable[Entry]) -> None:
        """Serves them from now on."""
        for entry in found:
            if self.unservable.pop(entry.key, None) is not None:
                self._make_lines(entry)

    def _add(self, entry: Entry) -> None:
        self.entries[entry.key] = entry
        reason = self._why_not(entry)
        if reason is None:
            self._make_lines(entry)
        else:
            log.warning("model %s cannot be served here: %s", entry.key, reason)
            self.unservable[entry.key] = reason

    def _make_lines(self, entry: Entry) -> None:
        kind = SlotLine if entry.generates else Line
        for lane in self._lanes:
            line = self.lines[(entry.key, lane)] = kind(
                entry,
                lane,
                devices=self._devices,
                window_items=self._window_items,
                budget_tokens=entry.profile.batch_tokens,
            )
            if isinstance(line, SlotLine):
                line.room = self.slot_room

    def _drop(self, entry: Entry) -> None:
        del self.entries[entry.key]
        self.unservable.pop(entry.key, None)
        for lane in self._lanes:
            self.lines.pop((entry.key, lane), None)
