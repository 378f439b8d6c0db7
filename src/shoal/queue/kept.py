"""Records by key in a NATS key-value bucket.

Owns claiming, replacing and forgetting them, each in one request to the broker and read from its
leader, so that two processes never both hold a key. Does not own what a record means
(`shoal.gateway.idempotency`, `shoal.worker`) or the settings of a bucket (`topology`).
"""

from __future__ import annotations

import math

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import Header, KeyValueConfig
from nats.js.errors import APIError, BadRequestError, NotFoundError

from shoal.errors import QueueUnavailable
from shoal.queue.connection import check_connected
from shoal.queue.interface import KeptRecord
from shoal.queue.link import Link

# "Wrong last sequence", with and without the number.
_ANOTHER_REVISION = (10071, 10164)


async def ensure_bucket(js: JetStreamContext, config: KeyValueConfig) -> None:
    """Creates a bucket, or finds it."""
    try:
        await js.create_key_value(config)
    except BadRequestError:  # it is there with other settings
        await js.key_value(config.bucket)


def is_another_revision(error: Exception) -> bool:
    """Whether a write was refused because the record is of another revision."""
    return isinstance(error, APIError) and error.err_code in _ANOTHER_REVISION


class NatsKept:
    """The `Kept` contract on a bucket."""

    def __init__(self, link: Link, config: KeyValueConfig) -> None:
        self._link = link
        self._js = link.jetstream()
        self._config = config
        self._stream = f"KV_{config.bucket}"

    async def ensure(self) -> None:
        """Creates the bucket, or finds it."""
        await ensure_bucket(self._js, self._config)

    async def claim(self, key: str, data: bytes, ttl_s: float) -> int | None:
        """Keeps `data` where there is nothing."""
        return await self._put(key, data, ttl_s, 0)

    async def replace(self, key: str, data: bytes, ttl_s: float, revision: int) -> int | None:
        """Keeps `data` in the place of a revision."""
        return await self._put(key, data, ttl_s, revision)

    async def _put(self, key: str, data: bytes, ttl_s: float, revision: int) -> int | None:
        check_connected(self._link)
        headers = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(revision)}
        try:
            ack = await self._js.publish(
                self._subject(key), data, headers=headers, msg_ttl=max(1, math.ceil(ttl_s))
            )
        except (NatsError, TimeoutError) as error:
            if is_another_revision(error):
                return None
            raise QueueUnavailable(
                f"the record was not kept: {error}", retry_after_s=1.0
            ) from error
        return int(ack.seq)

    async def get(self, key: str) -> KeptRecord | None:
        """The record of a key."""
        check_connected(self._link)
        try:
            raw = await self._js.get_msg(self._stream, subject=self._subject(key))
        except NotFoundError:
            return None
        except (NatsError, TimeoutError) as error:
            raise QueueUnavailable(f"no record can be read: {error}", retry_after_s=1.0) from error
        return KeptRecord(raw.data or b"", int(raw.seq or 0))

    async def delete(self, key: str, revision: int) -> None:
        """Forgets a revision, and whatever was before it."""
        check_connected(self._link)
        try:
            await self._js.purge_stream(self._stream, seq=revision + 1, subject=self._subject(key))
        except (NatsError, TimeoutError) as error:
            raise QueueUnavailable(f"a record was not deleted: {error}") from error

    def _subject(self, key: str) -> str:
        return f"$KV.{self._config.bucket}.{key}"
