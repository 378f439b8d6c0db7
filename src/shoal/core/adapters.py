"""Which adapters stay loaded beside one copy of a model.

A runtime computes with many adapters at once, but not with all that are registered: those that were
used last stay, up to a number. Owns what is loaded, what is in use (nothing in use goes), what it
takes, and what has to come and go before a batch can run. Does not own loading (the worker's
`adapters`) or which copies there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

MAX_RESIDENT_ADAPTERS = 32


@dataclass(slots=True)
class ResidentAdapter:
    """A loaded adapter. used_s: when it was last used. pins: batches and texts that use it now."""

    size_bytes: int
    used_s: float
    pins: int = 0


@dataclass(frozen=True, slots=True)
class Moves:
    """What has to go, then what has to come; keys of adapters."""

    unload: tuple[str, ...] = ()
    load: tuple[str, ...] = ()


class ResidentAdapters:
    """The adapters of one copy, by key."""

    def __init__(self) -> None:
        self.here: dict[str, ResidentAdapter] = {}

    @property
    def size_bytes(self) -> int:
        """What all of them take."""
        return sum(adapter.size_bytes for adapter in self.here.values())

    def plan(self, wanted: Collection[str], most: int) -> Moves | None:
        """What makes all of `wanted` be here, no more than `most` in all.

        The ones that are idle for longest go. None while too many others are in use. Raises
        `ValueError` where no plan could ever do it.
        """
        if len(set(wanted)) > most:
            raise ValueError(f"{len(set(wanted))} adapters at once, of {most}")
        load = tuple(key for key in dict.fromkeys(wanted) if key not in self.here)
        too_many = len(self.here) + len(load) - most
        if not load or too_many <= 0:
            return Moves(load=load)
        idle = self.idle(wanted)
        if len(idle) < too_many:
            return None
        return Moves(tuple(idle[:too_many]), load)

    def idle(self, wanted: Collection[str]) -> list[str]:
        """Those that are neither in use nor wanted, the one that is idle for longest first."""
        idle = [key for key, a in self.here.items() if not a.pins and key not in wanted]
        return sorted(idle, key=lambda key: self.here[key].used_s)

    def unwanted(self, is_wanted: Callable[[str], bool]) -> list[str]:
        """The idle ones that nobody can ask for any more."""
        return [key for key, a in self.here.items() if not a.pins and not is_wanted(key)]

    def add(self, key: str, size_bytes: int, now_s: float) -> None:
        """An adapter was loaded."""
        self.here[key] = ResidentAdapter(size_bytes, now_s)

    def drop(self, key: str) -> int:
        """An adapter was unloaded; the bytes that it took."""
        return self.here.pop(key).size_bytes

    def pin(self, keys: Collection[str]) -> None:
        """They are in use from now on."""
        for key in keys:
            self.here[key].pins += 1

    def unpin(self, keys: Collection[str], now_s: float) -> None:
        """A use of them has ended."""
        for key in keys:
            self.here[key].pins -= 1
            self.here[key].used_s = now_s


def parted(keys: Sequence[str], most: int) -> list[list[int]]:
    """Cuts a batch where it needs more than `most` adapters at once.

    keys: of each item, empty for none. The places of the items of each part, in order; an item
    goes into the first part that has its adapter, or room for it.
    """
    parts: list[list[int]] = []
    inside: list[set[str]] = []
    for at, key in enumerate(keys):
        fits = (not key or key in held or len(held) < most for held in inside)
        place = next((n for n, it_fits in enumerate(fits) if it_fits), len(parts))
        if place == len(parts):
            parts.append([])
            inside.append(set())
        parts[place].append(at)
        if key:
            inside[place].add(key)
    return parts
