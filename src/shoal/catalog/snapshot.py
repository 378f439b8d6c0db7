"""The catalog at one moment: names in, entries out.

Owns the names under which an entry is found (id, alias, either with `@revision`, and each of those
with the `@name` of an adapter) and the message for a name that is not there. Immutable: a changed
catalog is another Snapshot. Does not own files (`load`) or weights (`resolve`).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.catalog.schema import Adapter, AnyEntry, Entry
from shoal.core.spelling import did_you_mean
from shoal.errors import CatalogError, UnknownModel

MAX_COMPARED = 100


@dataclass(frozen=True, slots=True)
class Named:
    """What a name of a request stands for: a model, bare or with an adapter."""

    entry: Entry
    adapter: Adapter | None = None


class Snapshot:
    """Entries and adapters by name. `find` is one dictionary look-up and runs for every request.

    Raises `CatalogError` when two entries claim the same name, and for an adapter that nobody
    could ask for (see `shoal.catalog.change.clashes`).
    """

    def __init__(self, entries: Iterable[Entry], adapters: Iterable[Adapter] = ()) -> None:
        self.entries: tuple[Entry, ...] = tuple(sorted(entries, key=lambda entry: entry.id))
        self.adapters: tuple[Adapter, ...] = tuple(sorted(adapters, key=lambda each: each.id))
        self._by_name: dict[str, Named] = {}
        for entry in self.entries:
            named = Named(entry)
            for name in (entry.id, *entry.aliases):
                other = self._by_name.setdefault(name, named).entry
                if other is not entry:
                    raise CatalogError(f"`{name}` names both `{other.id}` and `{entry.id}`")
                self._by_name[f"{name}@{entry.revision}"] = named
        for adapter in self.adapters:
            self._add_adapter(adapter)

    def _add_adapter(self, adapter: Adapter) -> None:
        base = self.get(adapter.base)
        if base is None or base.id != adapter.base:
            raise CatalogError(f"`{adapter.id}` is of no model of the catalog")
        named = Named(base, adapter)
        for name in (base.id, *base.aliases):
            if self._by_name.setdefault(f"{name}@{adapter.name}", named) is not named:
                raise CatalogError(f"`{name}@{adapter.name}` has two meanings")
            self._by_name[f"{name}@{base.revision}@{adapter.name}"] = named

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def everything(self) -> tuple[AnyEntry, ...]:
        """The entries, then the adapters."""
        return (*self.entries, *self.adapters)

    def get(self, name: str) -> Entry | None:
        """The bare model that a name stands for, or None."""
        named = self._by_name.get(name)
        return named.entry if named is not None and named.adapter is None else None

    def resolve(self, name: str) -> Entry:
        """The bare model of a name. Raises `UnknownModel`, with the near names in it."""
        entry = self.get(name)
        if entry is None:
            raise UnknownModel(self._why_not(name), param="model")
        return entry

    def find(self, name: str) -> Named:
        """The model, or the model with an adapter, that a name stands for.

        Raises `UnknownModel`, with the near names in it.
        """
        named = self._by_name.get(name)
        if named is None:
            raise UnknownModel(self._why_not(name), param="model")
        return named

    def _why_not(self, name: str) -> str:
        base, at, rest = name.partition("@")
        entry = self.get(base) if at else None
        if entry is None:
            known = [n for e in self.entries for n in (e.id, *e.aliases)]
            guess = did_you_mean(base, known, max_names=3)
            return f"unknown model `{_short(name)}`{guess or '; /v1/models lists the models'}"
        names = [adapter.name for adapter in self.adapters if adapter.base == entry.id]
        if not names:
            there = f"there is `{entry.id}@{entry.revision}`"
            return f"model `{base}` has no revision or adapter `{_short(rest)}`; {there}"
        wrong = rest[:128].removeprefix(f"{entry.revision}@")
        place = bisect(names, wrong)  # of thousands, only those that stand near it are compared
        near = names[max(0, place - MAX_COMPARED // 2) :][:MAX_COMPARED]
        guess = did_you_mean(wrong, near, max_names=3)
        return (
            f"model `{base}` has no revision or adapter `{_short(rest)}`"
            f"{guess or '; /v1/models lists its adapters'}"
        )


def _short(name: str) -> str:
    return name if len(name) <= 128 else f"{name[:128]}..."
