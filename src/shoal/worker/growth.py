"""What a worker knows of a generating model, and of each of its texts that grows.

Owns the two structs. Does not own what happens to them (`streams`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from shoal.catalog.schema import Entry
from shoal.core.slots import Slots
from shoal.core.types import Item
from shoal.worker.device import Device, Loaded
from shoal.worker.pieces import Pieces


@dataclass(slots=True)
class GeneratorHere:
    """One generating model here. copies: what of it is loaded, as the slots know it.

    alone: the copies on which a text runs by itself, for it may be what took a process down.
    solo_next: whether it is such a text's turn. progress_s: when something last came of a copy that
    has texts. patience_s: how long nothing may come of it.
    """

    entry: Entry
    slots: Slots
    copies: dict[str, Loaded] = field(default_factory=dict)
    waiting: dict[str, Item] = field(default_factory=dict)
    alone: set[str] = field(default_factory=set)
    solo_next: bool = False
    progress_s: dict[str, float] = field(default_factory=dict)
    patience_s: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Growth:
    """A text under way. entry: as its copy runs it. ended: its slot has been given back."""

    item: Item
    device: Device
    loaded: Loaded
    entry: Entry
    pieces: Pieces
    begun_s: float
    task: asyncio.Task[None] | None = None
    ended: bool = False
