"""Reading a key-value bucket's stream through consumers that live as long as somebody reads.

Owns making them, their inboxes (one each: the broker sends nothing to a consumer unless somebody
listens to exactly its subject), and noticing that messages were lost or nothing comes any more
(the broker is away, or forgot the consumer). Does not own what is done then (`shelf`).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from shoal.clock import monotonic
from shoal.errors import QueueUnavailable
from shoal.queue.connection import check_connected
from shoal.queue.interface import OnRecord, ShelfRecord
from shoal.queue.link import Link

log = logging.getLogger(__name__)

READ_S = 5.0
_BEAT_S = 2.0
_SILENT_S = 3 * _BEAT_S
_FORGET_S = 60.0  # after which the broker drops the consumer of a process that died
_STATUS = b"NATS/1.0 "
_LAST = b"nats-last-consumer:"
_OPERATION = b"kv-operation:"  # DEL or PURGE; a value has none
_MARKER = b"nats-marker-reason:"  # a removal of the broker's own


class Replay:
    """One consumer's messages: first those that are there, then each new one.

    on_record: called in the turn that reads the message. done: all that were there have come.
    lost: it will tell nothing more, or has missed something.
    """

    def __init__(self, name: str, on_record: OnRecord) -> None:
        self.name = name
        self.done = asyncio.Event()
        self.lost = asyncio.Event()
        self._on_record = on_record
        self._count = 0
        self._heard_s = monotonic()

    def expect(self, n_waiting: int) -> None:
        """How many messages there were when the consumer was made."""
        if n_waiting == 0 and self._count == 0:
            self.done.set()

    def on_message(self, record: ShelfRecord, number: int, n_waiting: int) -> None:
        """A message, the consumer's `number`th, with others to come."""
        self._heard_s = monotonic()
        self._count += 1
        if number != self._count:
            self.lost.set()
        if self.lost.is_set():
            return
        self._on_record(record)
        if n_waiting == 0:
            self.done.set()

    def on_beat(self, number: int) -> None:
        """A sign of life, with the number of the last message."""
        self._heard_s = monotonic()
        if number != self._count:
            self.lost.set()

    async def until_lost(self) -> None:
        """Returns when it is lost; silence is noticed, too."""
        while not self.lost.is_set():
            try:
                async with asyncio.timeout(_BEAT_S):
                    await self.lost.wait()
            except TimeoutError:
                if monotonic() - self._heard_s > _SILENT_S:
                    self.lost.set()


class Replays:
    """The replays of one bucket, by the name of their consumer."""

    def __init__(self, link: Link, bucket: str) -> None:
        self._link = link
        self._js = link.jetstream()
        self._stream = f"KV_{bucket}"
        self._root = f"$KV.{bucket}."
        self._id = uuid.uuid4().hex[:16]
        self._number = 0
        self._open: dict[str, Replay] = {}

    def lose_all(self) -> None:
        """Their consumers may be gone."""
        for replay in self._open.values():
            replay.lost.set()

    @asynccontextmanager
    async def _opened(
        self, keys: str, on_record: OnRecord, *, versions: bool
    ) -> AsyncIterator[Replay]:
        check_connected(self._link)
        self._number += 1
        replay = Replay(f"{self._id}-{self._number}", on_record)
        self._open[replay.name] = replay
        inbox: Subscription | None = None
        try:
            subject = f"_INBOX.{self._id}.{self._number}"
            inbox = await self._link.listen(subject, partial(self._on_message, replay))
            info = await self._js.add_consumer(
                self._stream, _consumer(replay.name, subject, f"{self._root}{keys}", versions)
            )
            told = info.delivered.consumer_seq if info.delivered else 0
            replay.expect((info.num_pending or 0) + (told or 0))
            yield replay
        except (NatsError, TimeoutError) as error:
            raise QueueUnavailable(f"records cannot be read: {error}", retry_after_s=1.0) from error
        finally:
            del self._open[replay.name]
            await self._end(replay, inbox)

    async def read(self, keys: str, *, versions: bool) -> list[ShelfRecord]:
        """What is there: the newest version of each key, or all. Raises `QueueUnavailable`."""
        found: list[ShelfRecord] = []
        async with self._opened(keys, found.append, versions=versions) as replay:
            async with asyncio.timeout(READ_S):
                await replay.done.wait()
        return found

    async def run(self, on_record: OnRecord, on_done: Callable[[], None]) -> None:
        """Tells of the newest version of everything, then of each new version, until it is lost.

        Raises `QueueUnavailable` where it cannot begin.
        """
        async with self._opened(">", on_record, versions=False) as replay:
            losing = asyncio.create_task(replay.until_lost(), name="replay")
            waiting = asyncio.create_task(replay.done.wait(), name="replay done")
            try:
                await asyncio.wait([losing, waiting], return_when=asyncio.FIRST_COMPLETED)
                if replay.done.is_set():
                    on_done()
                await losing
            finally:
                losing.cancel()
                waiting.cancel()

    async def _end(self, replay: Replay, inbox: Subscription | None) -> None:
        """Lets go of both; what the broker is not told it forgets by itself."""
        try:
            if inbox is not None:
                await self._link.silence(inbox)
            if self._link.is_connected:
                await self._js.delete_consumer(self._stream, replay.name)
        except (NatsError, TimeoutError) as error:
            log.debug("letting go of a reader: %r", error)

    def _on_message(
        self, replay: Replay, subject: bytes, reply: bytes, headers: bytes, data: bytes
    ) -> None:
        if headers.startswith(_STATUS) and not reply:
            last = _header(headers, _LAST)
            if last:
                replay.on_beat(int(last))
            return
        # $JS.ACK.[<domain>.<account>.]<stream>.<consumer>.<deliveries>.<sequence in the stream>
        # .<sequence in the consumer>.<time>.<pending>, in a domain with one more behind it
        tokens = reply.split(b".")
        at = 5 if len(tokens) == 9 else 7
        sequence, number, time_ns, n_waiting = (int(each) for each in tokens[at : at + 4])
        gone = _header(headers, _OPERATION) or _header(headers, _MARKER)
        key = subject.decode().removeprefix(self._root)
        record = ShelfRecord(key, None if gone else data, sequence, time_ns / 1e9)
        replay.on_message(record, number, n_waiting)


def _consumer(name: str, inbox: str, subjects: str, versions: bool) -> ConsumerConfig:
    return ConsumerConfig(
        name=name,
        description="Shoal: a process that reads",
        deliver_subject=inbox,
        deliver_policy=DeliverPolicy.ALL if versions else DeliverPolicy.LAST_PER_SUBJECT,
        filter_subject=subjects,
        ack_policy=AckPolicy.NONE,
        idle_heartbeat=_BEAT_S,
        inactive_threshold=_FORGET_S,
        mem_storage=True,
        num_replicas=1,
    )


def _header(headers: bytes, name: bytes) -> bytes:
    """A header's value; empty when it is not there. name: in lower case, with its colon."""
    for line in headers.split(b"\r\n")[1:]:
        if line.lower().startswith(name):
            return line[len(name) :].strip()
    return b""
