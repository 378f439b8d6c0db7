"""Large bodies in the NATS object store.

Owns keys, digests and the bucket's bounds. Does not own the decision what is large
(`inline_max_bytes`), which is the gateway's and the worker's.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import ObjectStoreConfig, RawStreamMsg
from nats.js.errors import APIError, BadRequestError, NotFoundError, ObjectNotFoundError
from nats.js.object_store import ObjectStore

from shoal.errors import QueueUnavailable
from shoal.wire.envelope import PayloadRef

GET_S = 60.0
# "Maximum bytes exceeded", of the stream and of the account's room.
_FULL = (10054, 10047, 10077)


def reference(data: bytes) -> PayloadRef:
    """A new reference to `data`: a random key, its size and its SHA-256."""
    return PayloadRef(uuid.uuid4().hex, len(data), hashlib.sha256(data).hexdigest())


def check(ref: PayloadRef, data: bytes) -> bytes:
    """`data`, when it is what `ref` speaks of. Raises `QueueUnavailable`."""
    if len(data) != ref.size_bytes or hashlib.sha256(data).hexdigest() != ref.sha256:
        raise QueueUnavailable(f"payload {ref.key} does not match its digest")
    return data


class NatsPayloads:
    """The `Payloads` contract on a NATS object store. what: said of it in errors."""

    def __init__(self, js: JetStreamContext, config: ObjectStoreConfig, what: str) -> None:
        self._js = js
        self._config = config
        self._bucket = config.bucket or ""
        self._what = what
        self._store: ObjectStore | None = None

    async def ensure(self) -> None:
        """Creates the bucket, or finds it."""
        try:
            self._store = await self._js.create_object_store(self._bucket, self._config)
        except BadRequestError:  # it is there with other settings
            self._store = await self._js.object_store(self._bucket)

    def _ready(self) -> ObjectStore:
        if self._store is None:
            raise QueueUnavailable("the payload store is not open")
        return self._store

    async def put(self, data: bytes) -> PayloadRef:
        """Keeps `data` under a new key."""
        ref = reference(data)
        try:
            await self._ready().put(ref.key, data)
        except (NatsError, TimeoutError) as error:
            full = isinstance(error, APIError) and error.err_code in _FULL
            raise QueueUnavailable(
                f"the store of {self._what} is full: {len(data)} bytes have no room in its "
                f"{self._config.max_bytes} until others are done; try again, or send less at once"
                if full
                else f"the store of {self._what} refused {len(data)} bytes: {error}",
                retry_after_s=1.0,
            ) from error
        return ref

    async def get(self, ref: PayloadRef) -> bytes:
        """The bytes of `ref`."""
        try:
            async with asyncio.timeout(GET_S):
                data = await self._read(ref)
        except (ObjectNotFoundError, NotFoundError) as error:
            raise QueueUnavailable(f"payload {ref.key} is gone") from error
        except (NatsError, TimeoutError) as error:
            raise QueueUnavailable(f"the payload store did not answer: {error}") from error
        return check(ref, data)

    async def _read(self, ref: PayloadRef) -> bytes:
        """The object's pieces, each asked for by itself.

        The library's own reading waits for the next piece without a limit, and leaves its consumer
        behind where it is given up: of an object that is deleted meanwhile it never ends.
        """
        info = await self._ready().get_info(ref.key)
        stream, subject = f"OBJ_{self._bucket}", f"$O.{self._bucket}.C.{info.nuid}"
        data, sequence = bytearray(), 1
        while len(data) < min(info.size or 0, ref.size_bytes):
            piece = await self._piece(stream, subject, sequence)
            data += piece.data or b""
            sequence = (piece.seq or sequence) + 1
        return bytes(data)

    async def _piece(self, stream: str, subject: str, sequence: int) -> RawStreamMsg:
        """The first message of a subject from a place on; the leader's, where a replica lags."""
        ask = {"stream_name": stream, "seq": sequence, "subject": subject, "next": True}
        try:
            return await self._js.get_msg(**ask, direct=True)
        except NotFoundError:
            return await self._js.get_msg(**ask)

    async def delete(self, ref: PayloadRef) -> None:
        """Forgets `ref`; the bucket's age limit catches what this misses."""
        try:
            await self._ready().delete(ref.key)
        except (NatsError, TimeoutError):
            return
