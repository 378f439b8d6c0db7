"""Deliveries that were given back untouched, so that they do not count as attempts.

A broker counts deliveries, whatever became of them. Who gives an item back without having begun it
writes down how many of its deliveries ended so; every process of the pool hears that as a plain
message before the item goes on to the next worker, and one that starts later reads it from the
bucket that keeps these messages. What is missed (a full bucket, a cluster that overtakes itself)
costs an item an attempt, never more.

Owns the counts and their subjects. Does not own what an attempt means (`shoal.core.delivery`) or
the settings of the bucket (`topology`).
"""

from __future__ import annotations

import logging

from nats.errors import Error as NatsError
from nats.js.api import KeyValueConfig

from shoal.errors import QueueUnavailable
from shoal.queue.kept import ensure_bucket
from shoal.queue.link import Link
from shoal.queue.replay import Replays

log = logging.getLogger(__name__)

MAX_COUNTS = 65_536


class Untouched:
    """How many deliveries of an item were given back untouched, by the item's name in its stream.

    A name has letters, digits and `-`.
    """

    def __init__(self, link: Link, config: KeyValueConfig) -> None:
        self._link = link
        self._config = config
        self._root = f"$KV.{config.bucket}.".encode()
        self._replays = Replays(link, config.bucket or "")
        self._counts: dict[bytes, int] = {}

    async def ensure(self) -> None:
        """Creates the bucket, or finds it, and reads what was written while nobody heard it."""
        await ensure_bucket(self._link.jetstream(), self._config)
        try:
            for record in await self._replays.read(">", versions=False):
                self._on_count(record.key.encode(), record.data or b"")
        except QueueUnavailable as error:
            log.debug("what was given back before: %s", error)

    async def listen(self) -> None:
        """Hears of all counts from now on."""
        await self._link.listen(self._root.decode() + "*", self._on_message)

    def count(self, name: bytes) -> int:
        """Deliveries of an item that were no attempts."""
        return self._counts.get(name, 0)

    def add(self, name: bytes) -> None:
        """One more; said before the item is given back, so that it is known before it comes."""
        try:
            self._link.send(self._root + name, b"%d" % (self.count(name) + 1))
        except NatsError as error:
            log.debug("an item was given back untouched, and nobody was told: %r", error)

    def _on_message(self, subject: bytes, _reply: bytes, _headers: bytes, data: bytes) -> None:
        self._on_count(subject.removeprefix(self._root), data)

    def _on_count(self, name: bytes, data: bytes) -> None:
        if data.isdigit():
            count = max(self.count(name), int(data))
            self._counts.pop(name, None)  # what is said anew is not the oldest
            self._counts[name] = count
            if len(self._counts) > MAX_COUNTS:
                del self._counts[next(iter(self._counts))]
