"""The catalog at one moment: names in, entries out.

Owns the names under which an entry is found (id, alias, either with `@revision`) and the message
for a name that is not there. Immutable: a changed catalog is another Snapshot. Does not own files
(`load`) or weights (`resolve`).
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.catalog.schema import Entry
from shoal.core.spelling import did_you_mean
from shoal.errors import CatalogError, UnknownModel


class Snapshot:
    """Entries by name. `resolve` is one dictionary look-up and runs for every request.

    Raises `CatalogError` when two entries claim the same name.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries: tuple[Entry, ...] = tuple(sorted(entries, key=lambda entry: entry.id))
        self._by_name: dict[str, Entry] = {}
        for entry in self.entries:
            for name in (entry.id, *entry.aliases):
                other = self._by_name.setdefault(name, entry)
                if other is not entry:
                    raise CatalogError(f"`{name}` names both `{other.id}` and `{entry.id}`")
                self._by_name[f"{name}@{entry.revision}"] = entry

    def __len__(self) -> int:
        return len(self.entries)

    def get(self, name: str) -> Entry | None:
        """The entry that a name stands for, or None."""
        return self._by_name.get(name)

    def resolve(self, name: str) -> Entry:
        """The entry that a name stands for. Raises `UnknownModel`, with the near names in it."""
        entry = self._by_name.get(name)
        if entry is None:
            raise UnknownModel(self._why_not(name), param="model")
        return entry

    def _why_not(self, name: str) -> str:
        base, at, revision = name.partition("@")
        entry = self._by_name.get(base) if at else None
        if entry is not None:
            return (
                f"model `{base}` has no revision `{revision}`; there is `{entry.id}@"
                f"{entry.revision}`"
            )
        known = [n for e in self.entries for n in (e.id, *e.aliases)]
        guess = did_you_mean(base, known, max_names=3)
        shown = name if len(name) <= 128 else f"{name[:128]}..."
        return f"unknown model `{shown}`{guess or '; /v1/models lists the models'}"
