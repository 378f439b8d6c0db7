"""The stores of the queue inside one process: payloads, dead letters, kept records, the shelf.

Owns the same contracts as the NATS ones, checked by the same suites, with plain dictionaries. Does
not own lines and pulls (`memory`).
"""

from __future__ import annotations

import itertools

from shoal.clock import monotonic, wall
from shoal.errors import QueueUnavailable
from shoal.queue.interface import (
    Buried,
    KeptRecord,
    OnRecord,
    QueueLimits,
    ShelfRecord,
)
from shoal.queue.payloads import check, reference
from shoal.queue.topology import CATALOG_VERSIONS
from shoal.wire.envelope import DeadLetter, PayloadRef


class MemoryStores:
    """What is kept, and its bounds."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.numbers = itertools.count(1)
        self.payloads: dict[str, bytes] = {}
        self.answers: dict[str, bytes] = {}
        self.dead: dict[int, DeadLetter] = {}
        self.dead_numbers = itertools.count(1)
        self.kept: dict[str, tuple[KeptRecord, float]] = {}
        self.leases: dict[str, tuple[KeptRecord, float]] = {}
        self.shelf: dict[str, list[ShelfRecord]] = {}
        self.shelf_followers: list[OnRecord] = []


class MemoryPayloads:
    """`Payloads` in a dictionary, as many bytes as it may hold."""

    def __init__(self, held: dict[str, bytes], max_bytes: int) -> None:
        self._held = held
        self._max_bytes = max_bytes

    async def ensure(self) -> None:
        """The dictionary is there."""

    async def put(self, data: bytes) -> PayloadRef:
        """Keeps `data`."""
        held_bytes = sum(len(d) for d in self._held.values())
        if held_bytes + len(data) > self._max_bytes:
            raise QueueUnavailable("the payload store is full", retry_after_s=1.0)
        ref = reference(data)
        self._held[ref.key] = data
        return ref

    async def get(self, ref: PayloadRef) -> bytes:
        """The bytes of `ref`."""
        if ref.key not in self._held:
            raise QueueUnavailable(f"payload {ref.key} is gone")
        return check(ref, self._held[ref.key])

    async def delete(self, ref: PayloadRef) -> None:
        """Forgets `ref`."""
        self._held.pop(ref.key, None)


class MemoryDeadLetters:
    """`DeadLetters` in a list."""

    def __init__(self, broker: MemoryStores) -> None:
        self._broker = broker

    async def ensure(self) -> None:
        """The dictionary is there."""

    async def bury(self, letter: DeadLetter) -> None:
        """Keeps a letter; the oldest make room."""
        dead, limits = self._broker.dead, self._broker.limits
        dead[next(self._broker.dead_numbers)] = letter
        while len(dead) > limits.dead_max_letters:
            del dead[next(iter(dead))]

    async def read(self, first: int = 0, most: int = 1000) -> list[Buried]:
        """Letters in the order of their numbers."""
        numbers = [n for n in self._broker.dead if n >= first][:most]
        return [Buried(n, self._broker.dead[n]) for n in numbers]

    async def drop(self, number: int) -> bool:
        """Forgets a letter."""
        return self._broker.dead.pop(number, None) is not None


class MemoryKept:
    """`Kept` in a dictionary."""

    def __init__(
        self, broker: MemoryStores, records: dict[str, tuple[KeptRecord, float]], max_bytes: int
    ) -> None:
        self._broker = broker
        self._records = records
        self._max_bytes = max_bytes

    async def ensure(self) -> None:
        """The dictionary is there."""

    async def claim(self, key: str, data: bytes, ttl_s: float) -> int | None:
        """Keeps `data` where there is nothing."""
        return await self.replace(key, data, ttl_s, 0)

    async def get(self, key: str) -> KeptRecord | None:
        """The record of a key."""
        record, expires_s = self._records.get(key, (None, 0.0))
        if record is not None and expires_s <= monotonic():
            del self._records[key]
            return None
        return record

    async def replace(self, key: str, data: bytes, ttl_s: float, revision: int) -> int | None:
        """Keeps `data` in the place of a revision."""
        found = await self.get(key)
        if (found.revision if found else 0) != revision:
            return None
        others = sum(len(r.data) for k, (r, _) in self._records.items() if k != key)
        if others + len(data) > self._max_bytes:
            raise QueueUnavailable("the store of kept records is full", retry_after_s=1.0)
        record = KeptRecord(data, next(self._broker.numbers))
        self._records[key] = (record, monotonic() + ttl_s)
        return record.revision

    async def delete(self, key: str, revision: int) -> None:
        """Forgets a revision."""
        found = await self.get(key)
        if found is not None and found.revision == revision:
            del self._records[key]


class MemoryShelf:
    """`Shelf` in a dictionary of lists."""

    def __init__(self, broker: MemoryStores) -> None:
        self._broker = broker
        self._followers: list[OnRecord] = []

    async def ensure(self) -> None:
        """The dictionary is there."""

    async def read(self) -> list[ShelfRecord]:
        """The newest version of every record that is there."""
        newest = [versions[-1] for versions in self._broker.shelf.values()]
        return [record for record in newest if record.data is not None]

    async def versions(self, key: str) -> list[ShelfRecord]:
        """The kept versions of a record."""
        return list(self._broker.shelf.get(key, []))

    async def put(self, key: str, data: bytes, revision: int | None = None) -> int | None:
        """A new version."""
        last = self._last(key)
        have, is_gone = (last.revision, last.data is None) if last else (0, True)
        if not (revision in (None, have) or (revision == 0 and is_gone)):
            return None
        limits = self._broker.limits
        held = sum(len(r.data or b"") for each in self._broker.shelf.values() for r in each)
        if len(data) > limits.catalog_max_record_bytes:
            raise QueueUnavailable("the record is too large")
        if held + len(data) > limits.catalog_max_bytes:
            raise QueueUnavailable("the shelf is full", retry_after_s=1.0)
        return self._write(key, data)

    async def remove(self, key: str, revision: int | None = None) -> bool:
        """Writes down that a record is gone."""
        last = self._last(key)
        if last is None or last.data is None or revision not in (None, last.revision):
            return False
        self._write(key, None)
        return True

    async def follow(self, on_record: OnRecord) -> None:
        """Calls `on_record` for what is there, and from now on."""
        for versions in self._broker.shelf.values():
            on_record(versions[-1])
        self._broker.shelf_followers.append(on_record)
        self._followers.append(on_record)

    async def close(self) -> None:
        """Follows no longer."""
        for on_record in self._followers:
            self._broker.shelf_followers.remove(on_record)
        self._followers.clear()

    def _last(self, key: str) -> ShelfRecord | None:
        versions = self._broker.shelf.get(key)
        return versions[-1] if versions else None

    def _write(self, key: str, data: bytes | None) -> int:
        record = ShelfRecord(key, data, next(self._broker.numbers), wall())
        versions = self._broker.shelf.setdefault(key, [])
        versions.append(record)
        del versions[:-CATALOG_VERSIONS]
        for on_record in self._broker.shelf_followers:
            on_record(record)
        return record.revision
