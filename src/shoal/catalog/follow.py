"""The catalog as it is now, in every process.

Owns turning what stands on the shelf into the current `Snapshot`, passing over records that cannot
be used, and remembering what was replaced, for items of it may still be in line. Names the few
methods of a shelf that the catalog needs, so that it knows nothing of the queue behind it. Does not
own what a record is (`change`) or who writes one (`seed`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

from shoal.catalog.change import (
    Record,
    clashes,
    decode_record,
    encode_record,
    parted,
    shelf_key,
)
from shoal.catalog.schema import Adapter, AnyEntry, Entry
from shoal.catalog.snapshot import Snapshot
from shoal.clock import wall
from shoal.errors import CatalogError, QueueUnavailable

log = logging.getLogger(__name__)

RETIRED_S = 600.0  # the longest deadline that a gateway allows unless it is told otherwise
_ANY_POOL = ""  # an adapter is served wherever its model is


class ShelfRecord(Protocol):
    """A version of a record; see `shoal.queue.interface.ShelfRecord`."""

    @property
    def key(self) -> str:
        """What it stands under."""

    @property
    def data(self) -> bytes | None:
        """Its bytes; None where it was removed."""

    @property
    def revision(self) -> int:
        """Higher than that of every earlier version."""

    @property
    def at_s(self) -> float:
        """When it was written, in wall-clock seconds."""


class Shelf(Protocol):
    """Where the records stand; see `shoal.queue.interface.Shelf`."""

    async def read(self) -> Sequence[ShelfRecord]:
        """The newest version of every record that is there."""

    async def versions(self, key: str) -> Sequence[ShelfRecord]:
        """The kept versions of a record, removals included, the oldest first."""

    async def put(self, key: str, data: bytes, revision: int | None = None) -> int | None:
        """A new version; None where `revision` is given and not the newest (0: none is there)."""

    async def remove(self, key: str, revision: int | None = None) -> bool:
        """Removes a record."""

    async def follow(self, on_record: Callable[[ShelfRecord], None]) -> None:
        """Tells of every record that is there, then of every version from now on."""


class Following:
    """Follows a shelf for as long as the process lives. `start` it once.

    on_change: called in the event loop with every new snapshot, the first one included.

    Attributes:
        snapshot: the catalog now; empty until `start` has returned.
        faults: why a record is passed over, by its key. A record that cannot be read does not take
            the place of its last version that can; one with a name that another has is left out.
    """

    def __init__(
        self, shelf: Shelf, *, on_change: Callable[[Snapshot], None] = lambda _: None
    ) -> None:
        self._shelf = shelf
        self._on_change = on_change
        self.snapshot = Snapshot(())
        self.faults: dict[str, str] = {}
        self._records: dict[str, tuple[int, Record]] = {}
        self._written_s: dict[str, float] = {}
        self._unreadable: dict[str, str] = {}
        self._retired: dict[tuple[str, str], tuple[AnyEntry, float]] = {}
        self._adapters: dict[str, Adapter] = {}
        self._started = False
        self._is_due = False

    async def start(self) -> None:
        """Reads what is there and follows from now on. Raises `QueueUnavailable`."""
        await self._shelf.follow(self._on_record)
        for key in list(self._unreadable):
            await self._use_last_readable(key)
        self._started = True
        self._rebuild()

    async def recall(self) -> None:
        """Looks up what was replaced before `start`, for `retired`. Raises `QueueUnavailable`."""
        since_s = wall() - RETIRED_S
        for key in [key for key, at_s in self._written_s.items() if at_s > since_s]:
            versions = await self._shelf.versions(key)
            for old, new in pairwise(versions):
                record = _readable(old)
                if record is not None:
                    self._retire(record.entry, new.at_s)

    async def restore(self) -> None:
        """Writes back what is held where the broker has lost all of it; call it `when_back`.

        A broker that keeps its queue in memory forgets the catalog when it is started again. One
        that goes away meanwhile comes back, and then this is called again.
        """
        try:
            if await self._shelf.read():
                return
            for key, (_, record) in list(self._records.items()):
                if not await self._shelf.versions(key):  # a removed one has some
                    await self._shelf.put(key, encode_record(record), 0)
        except QueueUnavailable as error:
            log.warning("the catalog was not written back: %s", error)

    def entries(self, pool: str) -> list[Entry]:
        """The entries that a pool serves now."""
        return [entry for entry in self.snapshot.entries if entry.pool == pool]

    def retired(self, pool: str) -> list[Entry]:
        """What the pool served until lately and no longer does: earlier revisions, removed models.

        Each is here for `RETIRED_S` after it was replaced; the one replaced last comes first.
        """
        self._forget_old()
        current = {(entry.key, entry.pool) for entry in self.snapshot.entries}
        found = [(e, at_s) for n, (e, at_s) in self._retired.items() if n not in current]
        found.sort(key=lambda each: -each[1])
        return [e for e, _ in found if isinstance(e, Entry) and e.pool == pool]

    def adapter(self, key: str) -> Adapter | None:
        """The adapter of a key (`base@name@revision`), now or retired; None where there is none."""
        found = self._adapters.get(key)
        if found is not None:
            return found
        self._forget_old()
        retired, _ = self._retired.get((key, _ANY_POOL), (None, 0.0))
        return retired if isinstance(retired, Adapter) else None

    def has_adapters(self, model_id: str) -> bool:
        """Whether a model has adapters now."""
        return any(adapter.base == model_id for adapter in self.snapshot.adapters)

    def _forget_old(self) -> None:
        now_s = wall()
        old = [name for name, (_, at_s) in self._retired.items() if at_s <= now_s - RETIRED_S]
        for name in old:
            del self._retired[name]

    def _on_record(self, version: ShelfRecord) -> None:
        key = version.key
        self._unreadable.pop(key, None)
        self._written_s[key] = version.at_s
        _, held = self._records.get(key, (0, None))
        if version.data is None:
            self._records.pop(key, None)
        else:
            try:
                self._records[key] = (version.revision, decode_record(key, version.data))
            except CatalogError as error:
                self._unreadable[key] = str(error)
                log.warning("the catalog's record %s is passed over: %s", key, error)
                held = None
        if held is not None:
            self._retire(held.entry, version.at_s)
        if self._started and not self._is_due:
            self._is_due = True  # several that come at once are one change
            asyncio.get_running_loop().call_soon(self._rebuild)

    async def _use_last_readable(self, key: str) -> None:
        for version in reversed(await self._shelf.versions(key)):
            record = _readable(version)
            if record is not None:
                self._records.setdefault(key, (version.revision, record))
            if record is not None or version.data is None:
                return

    def _retire(self, entry: AnyEntry, at_s: float) -> None:
        name = (entry.key, _ANY_POOL if isinstance(entry, Adapter) else entry.pool)
        _, before_s = self._retired.get(name, (entry, 0.0))
        self._retired[name] = (entry, max(at_s, before_s))

    def _rebuild(self) -> None:
        self._is_due = False
        # By revision, so that every process leaves out the same one of two that share a name.
        held = sorted(self._records.values(), key=lambda each: each[0])
        entries = [record.entry for _, record in held]
        out = clashes(entries)
        known = self.faults.values()
        for reason in (reason for reason in out.values() if reason not in known):
            log.warning("left out of the catalog: %s", reason)
        self.faults = self._unreadable | {shelf_key(name): why for name, why in out.items()}
        models, adapters = parted(entry for entry in entries if entry.id not in out)
        self.snapshot = Snapshot(models, adapters)
        self._adapters = {adapter.key: adapter for adapter in adapters}
        self._on_change(self.snapshot)


def _readable(version: ShelfRecord) -> Record | None:
    try:
        return None if version.data is None else decode_record(version.key, version.data)
    except CatalogError:
        return None
