"""Records that stay, with their last versions, in a NATS key-value bucket.

Owns writing them and following them, over any number of restarts of the broker. Does not own how
they are read (`replay`) or what a record means (`shoal.catalog`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial
from typing import TypeVar

from nats.errors import Error as NatsError
from nats.js.api import Header, KeyValueConfig, RawStreamMsg
from nats.js.errors import NoStreamResponseError, NotFoundError

from shoal.clock import monotonic
from shoal.errors import QueueUnavailable
from shoal.queue.connection import check_connected
from shoal.queue.interface import OnRecord, ShelfRecord
from shoal.queue.kept import ensure_bucket, is_another_revision
from shoal.queue.link import Link
from shoal.queue.replay import Replays

log = logging.getLogger(__name__)

_OPERATION = "KV-Operation"
_REMOVAL = {_OPERATION: "DEL"}
_AGAIN_S = 0.2
_ELECTION_S = 10.0
T = TypeVar("T")
_REMOVE_TRIES = 3


class NatsShelf:
    """The `Shelf` contract on a bucket."""

    def __init__(self, link: Link, config: KeyValueConfig) -> None:
        self._link = link
        self._js = link.jetstream()
        self._config = config
        self._stream = f"KV_{config.bucket}"
        self._replays = Replays(link, config.bucket or "")
        self._followers: list[asyncio.Task[None]] = []

    async def ensure(self) -> None:
        """Creates the bucket, or finds it."""
        await ensure_bucket(self._js, self._config)

    def on_back(self) -> None:
        """Follows anew: the broker was away, and may have forgotten who reads."""
        self._replays.lose_all()

    async def close(self) -> None:
        """Follows no longer."""
        for task in self._followers:
            task.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)

    async def read(self) -> list[ShelfRecord]:
        """The newest version of every record that is there."""
        found = await self._patiently(partial(self._replays.read, ">", versions=False))
        newest = {record.key: record for record in found}
        return [record for record in newest.values() if record.data is not None]

    async def versions(self, key: str) -> list[ShelfRecord]:
        """The kept versions of a record."""
        return await self._patiently(partial(self._replays.read, key, versions=True))

    async def _patiently(self, read: Callable[[], Awaitable[T]]) -> T:
        """Reads again while the nodes of a cluster elect who answers; not while all are away."""
        give_up_s = monotonic() + _ELECTION_S
        while True:
            try:
                return await read()
            except QueueUnavailable:
                if monotonic() > give_up_s or not self._link.is_connected:
                    raise
            await asyncio.sleep(_AGAIN_S)

    async def put(self, key: str, data: bytes, revision: int | None = None) -> int | None:
        """A new version."""
        written = await self._publish(key, data, revision)
        if written is None and revision == 0:
            last = await self._last(key)
            if last is not None and _is_removal(last):
                written = await self._publish(key, data, last.seq)
        return written

    async def remove(self, key: str, revision: int | None = None) -> bool:
        """Writes down that a record is gone."""
        for _ in range(_REMOVE_TRIES if revision is None else 1):
            last = await self._last(key)
            if last is None or _is_removal(last) or revision not in (None, last.seq):
                return False
            if await self._publish(key, b"", last.seq, _REMOVAL) is not None:
                return True
        return False

    async def _publish(
        self, key: str, data: bytes, revision: int | None, more: dict[str, str] | None = None
    ) -> int | None:
        check_connected(self._link)
        headers = dict(more or {})
        if revision is not None:
            headers[Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value] = str(revision)
        give_up_s = monotonic() + _ELECTION_S
        try:
            while True:
                try:
                    ack = await self._js.publish(self._subject(key), data, headers=headers or None)
                    break
                except NoStreamResponseError:  # nobody has it: it may be sent again
                    if monotonic() > give_up_s:
                        raise
                    await asyncio.sleep(_AGAIN_S)
        except (NatsError, TimeoutError) as error:
            if is_another_revision(error):
                return None
            raise QueueUnavailable(
                f"the record was not written: {error}", retry_after_s=1.0
            ) from error
        return int(ack.seq)

    async def _last(self, key: str) -> RawStreamMsg | None:
        check_connected(self._link)
        try:
            return await self._js.get_msg(self._stream, subject=self._subject(key))
        except NotFoundError:
            return None
        except (NatsError, TimeoutError) as error:
            raise QueueUnavailable(f"no record can be read: {error}", retry_after_s=1.0) from error

    def _subject(self, key: str) -> str:
        return f"$KV.{self._config.bucket}.{key}"

    async def follow(self, on_record: OnRecord) -> None:
        """Calls `on_record` for what is there, and from now on."""
        told = asyncio.get_running_loop().create_future()

        def on_done() -> None:
            if not told.done():
                told.set_result(None)

        follower = _Follower(on_record)
        task = asyncio.create_task(self._keep(follower, on_done), name="follow records")
        self._followers.append(task)
        await asyncio.wait([task, told], return_when=asyncio.FIRST_COMPLETED)
        if not told.done():  # it could not even begin
            self._followers.remove(task)
            await task

    async def _keep(self, follower: _Follower, on_done: Callable[[], None]) -> None:
        """Replays everything again whenever a replay was lost."""
        begun = False
        while True:
            try:
                follower.on_stream(await self._patiently(self._created))
                await self._replays.run(follower.on_record, on_done)
                begun = True
            except QueueUnavailable as error:
                if not begun:
                    raise
                log.debug("following records: %s", error)
            await asyncio.sleep(_AGAIN_S)

    async def _created(self) -> datetime | None:
        check_connected(self._link)
        try:
            info = await self._js.stream_info(self._stream)
        except (NatsError, TimeoutError) as error:
            raise QueueUnavailable(f"records cannot be read: {error}", retry_after_s=1.0) from error
        created: datetime | None = info.created
        return created


class _Follower:
    """Passes each version on once, and none after a newer one."""

    def __init__(self, on_record: OnRecord) -> None:
        self._tell = on_record
        self._told: dict[str, int] = {}
        self._created: datetime | None = None

    def on_stream(self, created: datetime | None) -> None:
        """Revisions begin anew in a stream that was made again (a memory one is gone)."""
        if created != self._created:
            self._told.clear()
        self._created = created

    def on_record(self, record: ShelfRecord) -> None:
        """A version that may have been told before."""
        if record.revision > self._told.get(record.key, 0):
            self._told[record.key] = record.revision
            self._tell(record)


def _is_removal(message: RawStreamMsg) -> bool:
    return _OPERATION in (message.headers or {})
