"""`Idempotency-Key`: a client's retry gets the answer of its first try instead of running again.

Owns the record of a key: who runs, what the answer was, and for which request. The first request
with a key claims it in the kept records, which all gateways share, for as long as its own deadline
and a little more; its answer then takes the claim's place for `idempotency_ttl_s`. Others with the
key wait for that answer. An error after which another try may succeed leaves nothing behind, also
where it stands in an answer in the place of one input, and neither does a client that left: the
next try runs. Where the records cannot be reached, a request
with a key is refused, for it might run twice. Does not own the store (`shoal.queue`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from shoal.clock import wall
from shoal.errors import (
    DeadlineExceeded,
    IdempotencyConflict,
    InvalidRequest,
    QueueFull,
    QueueUnavailable,
)
from shoal.gateway.pages import Response
from shoal.queue.interface import Queue
from shoal.wire.envelope import PayloadRef

log = logging.getLogger(__name__)

HEADER: Final = "Idempotency-Key"
REPLAYED: Final = (b"idempotent-replayed", b"true")
# A claim outlives its deadline by this, for the answer to be kept; a gateway that died in between
# blocks the key no longer.
LEASE_GRACE_S: Final = 5.0
MAX_WAITING: Final = 1000
FIRST_PAUSE_S: Final = 0.02
LONGEST_PAUSE_S: Final = 0.5

_KEY = re.compile(rb"[\x21-\x7e]{1,255}")


@dataclass(frozen=True, slots=True)
class Once:
    """A request that is to run once. name: its key in the store. deadline_s: wall-clock seconds."""

    name: str
    digest: bytes
    deadline_s: float


class _Record(msgspec.Struct, omit_defaults=True):
    """What a key stands for. status 0: it is still running. payload: where a large body lies."""

    digest: bytes
    status: int = 0
    content_type: bytes = b""
    headers: list[tuple[bytes, bytes]] = []
    body: bytes = b""
    payload: PayloadRef | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Record).decode


def once(header: bytes, tenant: str | None, path: str, body: bytes, deadline_s: float) -> Once:
    """What a request with the header is known by. Raises `InvalidRequest` for a wrong header.

    Tenants cannot meet each other's keys. Path and body are the request; lane and deadline may
    differ between tries.
    """
    if not _KEY.fullmatch(header):
        raise InvalidRequest(
            f"{HEADER} must be 1 to 255 visible ASCII characters; it has {len(header)} bytes",
            param=HEADER,
        )
    name = hashlib.sha256((tenant or "").encode() + b"\0" + header).hexdigest()
    digest = hashlib.sha256(path.encode() + b"\0")
    digest.update(body)
    return Once(name, digest.digest(), deadline_s)


class Idempotency:
    """Runs each key once among all gateways of a pool. ttl_s: how long an answer is kept."""

    def __init__(self, queue: Queue, *, ttl_s: float, inline_max_bytes: int) -> None:
        self._kept = queue.kept
        self._payloads = queue.answers
        self._ttl_s = ttl_s
        self._inline_max_bytes = inline_max_bytes
        self._n_waiting = 0
        self._tasks: set[asyncio.Task[Any]] = set()  # no more than open requests

    async def answer(self, asked: Once, run: Callable[[], Awaitable[Response]]) -> Response:
        """The answer of `run`, or the kept one of an earlier request with the key.

        run: raises what leaves nothing behind; a response is kept if it is final. Raises
        `IdempotencyConflict` where the key was of another request, `QueueUnavailable` where the
        store cannot be reached, `DeadlineExceeded` while the first is still running.
        """
        revision = await self._claim(asked)
        if revision is None:
            if self._n_waiting >= MAX_WAITING:
                raise QueueFull(f"{MAX_WAITING} requests wait for others with the same {HEADER}")
            self._n_waiting += 1
            try:
                found = await self._wait(asked)
            finally:
                self._n_waiting -= 1
            if isinstance(found, Response):
                return found
            revision = found
        done = False
        try:
            response = await run()
            done = response.final
        finally:
            if not done:
                await self._release(asked, revision)
        if not done:
            return response
        # A client that leaves now may come again for this answer.
        await asyncio.shield(self._spawn(self._keep(asked, revision, response)))
        return response

    async def _claim(self, asked: Once) -> int | None:
        """The revision of our claim; None where the key is taken."""
        ttl_s = max(0.0, asked.deadline_s - wall()) + LEASE_GRACE_S
        claim = self._spawn(self._kept.claim(asked.name, _encode(_Record(asked.digest)), ttl_s))
        try:
            return await asyncio.shield(claim)
        except asyncio.CancelledError:
            self._spawn(self._abandon(asked, claim))
            raise

    async def _abandon(self, asked: Once, claim: asyncio.Task[int | None]) -> None:
        """Gives back a claim whose request is over."""
        try:
            revision = await claim
        except QueueUnavailable:
            return
        if revision is not None:
            await self._release(asked, revision)

    async def _wait(self, asked: Once) -> Response | int:
        """The kept answer; or our claim, once the key is free."""
        pause_s = FIRST_PAUSE_S
        while True:
            found = await self._kept.get(asked.name)
            if found is None:
                revision = await self._claim(asked)
                if revision is not None:
                    return revision
            else:
                record = _read(found.data)
                if record.digest != asked.digest:
                    raise IdempotencyConflict(
                        f"this {HEADER} was sent with another request before", param=HEADER
                    )
                if record.status:
                    return await self._again(record)
            left_s = asked.deadline_s - wall()
            if left_s <= 0:
                raise DeadlineExceeded(f"the first request with this {HEADER} is still running")
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _again(self, record: _Record) -> Response:
        body = record.body
        if record.payload is not None:
            body = await self._payloads.get(record.payload)
        return Response(record.status, record.content_type, body, [*record.headers, REPLAYED])

    async def _keep(self, asked: Once, revision: int, response: Response) -> None:
        """Keeps an answer. Where that fails the claim stays: it ends by itself, after its time."""
        body, payload = response.body, None
        try:
            if len(body) > self._inline_max_bytes:
                body, payload = b"", await self._payloads.put(body)
            record = _Record(
                asked.digest,
                response.status,
                response.content_type,
                list(response.headers),
                body,
                payload,
            )
            kept = await self._kept.replace(asked.name, _encode(record), self._ttl_s, revision)
        except QueueUnavailable as error:
            log.warning("an answer could not be kept for a retry: %s", error)
            return
        if kept is None:
            log.warning("an answer came too late to be kept for a retry")
            if payload is not None:
                await self._payloads.delete(payload)

    async def _release(self, asked: Once, revision: int) -> None:
        try:
            await self._kept.delete(asked.name, revision)
        except QueueUnavailable as error:
            log.warning("an idempotency key stays taken for a while: %s", error)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name="idempotency")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _read(data: bytes) -> _Record:
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise QueueUnavailable(f"a kept answer cannot be read: {error}") from error
