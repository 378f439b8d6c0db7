"""One HTTP request while it is open: its headers, its body, and whether anybody still waits.

Owns reading a body within its limits and noticing a client that left or dawdles. Does not own what
a request means (`app`).

A send to a disconnected client is a silent no-op in uvicorn, so somebody has to notice the end of
the connection. A task that waits for it costs as much as a small request; the server tells instead
(`LEFT`), at once and for nothing. Only after a large body, where the server has stopped reading,
does a task wait. `Attendant` looks at the open visits ten times a second, for bodies that dawdle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, Protocol

from shoal import clock
from shoal.errors import (
    ClientGone,
    PayloadTooLarge,
    QueueFull,
    RequestTimeout,
    ShoalError,
    UnsupportedMedia,
)
from shoal.gateway.forms import Form, wanted_form

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ShortWay(Protocol):
    """What a server may offer besides messages, for the common request that is there at once."""

    def body(self) -> bytes | None:
        """The whole body, when it is there and small; else None, and it comes in messages."""

    def answer(self, status: int, head: bytes, body: bytes) -> bool:
        """Sends a whole answer; False when it has to go in messages.

        head: header lines that are known to be sound, with the body's length.
        """

    def streamed(self, n_bytes: int) -> None:
        """So many bytes more are sent of an answer that grows: its reader is judged by that."""


# The key of a scope under which the server finds what to call when the connection ends.
LEFT: Final = "shoal.left"
# The key under which the server puts its `ShortWay`, if it has one.
SHORT_WAY: Final = "shoal.short_way"
# uvicorn stops reading at this size, and does not see the end of the connection then.
PAUSED_BYTES: Final = 64 * 1024
GRACE_S: Final = 0.1
LINGER_S: Final = 1.0
LINGER_BYTES: Final = 8 * 1024 * 1024


class Visit:
    """One open request. `over` is why its task was cancelled, if one of ours cancelled it.

    streamed_bytes: of an answer that is sent while it grows; None before its head was sent.
    """

    __slots__ = (
        "body_read",
        "form",
        "headers",
        "id",
        "in_bytes",
        "over",
        "query",
        "receive",
        "send",
        "short_way",
        "started_s",
        "streamed_bytes",
        "task",
        "timer",
        "watcher",
    )

    def __init__(
        self,
        headers: dict[bytes, bytes],
        name: str,
        receive: Receive,
        send: Send,
        short_way: ShortWay | None = None,
    ) -> None:
        self.headers = headers
        self.id = name
        self.receive = receive
        self.send = send
        self.short_way = short_way
        self.query = b""
        self.form: Form = wanted_form(headers.get(b"accept"))
        self.started_s = clock.monotonic()
        self.in_bytes = 0
        self.streamed_bytes: int | None = None
        self.body_read = b"content-length" not in headers and b"transfer-encoding" not in headers
        self.over: ShoalError | None = None
        self.task: asyncio.Task[Any] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.watcher: asyncio.Task[None] | None = None

    async def body(self, max_bytes: int, attendant: Attendant) -> bytes:
        """The whole body.

        Raises `PayloadTooLarge` as soon as it is known to be over the limit, `UnsupportedMedia`
        where it is compressed, `ClientGone` where it ends early, `QueueFull` where all bodies
        together are more than may be in hand.
        """
        encoding = self.headers.get(b"content-encoding")
        if encoding is not None and encoding.strip().lower() != b"identity":
            raise UnsupportedMedia(
                f"content encoding {encoding[:50].decode('latin-1')!r} is not supported",
                param="Content-Encoding",
            )
        length = self.headers.get(b"content-length")
        if length is not None and int(length) > max_bytes:
            raise _too_large(max_bytes)
        body = None if self.short_way is None else self.short_way.body()
        if body is not None:
            self.in_bytes = len(body)
            attendant.take(self.in_bytes)
            if self.in_bytes > max_bytes:
                raise _too_large(max_bytes)
            self.body_read = True
            return body
        parts: list[bytes] = []
        more = True
        while more:
            message = await self.receive()
            if message["type"] != "http.request":
                raise ClientGone("the client left before its body was there")
            parts.append(message["body"])
            more = message["more_body"]
            self.in_bytes += len(parts[-1])
            attendant.take(len(parts[-1]))
            if self.in_bytes > max_bytes:
                raise _too_large(max_bytes)
        self.body_read = True
        if self.in_bytes >= PAUSED_BYTES:
            self.watcher = asyncio.create_task(_watch(self))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def end(self, why: ShoalError) -> None:
        """Cancels the visit's task, for a reason that it can tell from a foreign cancellation."""
        if self.over is None and self.task is not None:
            self.over = why
            self.task.cancel()

    def left(self) -> None:
        """The connection has ended before the answer."""
        self.end(ClientGone("the client left before its answer"))

    def unattended(self) -> None:
        """Ends the watch, before the answer is sent."""
        if self.timer is not None:
            self.timer.cancel()
        if self.watcher is not None:
            self.watcher.cancel()

    async def linger(self) -> None:
        """Reads on for a moment after an early answer.

        Closing while a body is still arriving resets the connection, and then the client may never
        see the answer. Bounded by `LINGER_S` and `LINGER_BYTES`.
        """
        left = LINGER_BYTES
        try:
            async with asyncio.timeout(LINGER_S):
                while left > 0:
                    message = await self.receive()
                    if message["type"] != "http.request" or not message["more_body"]:
                        return
                    left -= len(message["body"])
        except TimeoutError:
            return


class Attendant:
    """Counts the open visits, and limits the time of bodies that take longer than `GRACE_S`.

    max_visits bounds the open ones; the caller asks `overfull` once it has entered another.
    max_bytes bounds their bodies, all together.
    """

    def __init__(self, body_timeout_s: float, max_visits: int, max_bytes: int) -> None:
        self._body_timeout_s = body_timeout_s
        self._max_visits = max_visits
        self._max_bytes = max_bytes
        self._n_bytes = 0
        # In the order of their start, so that a round looks only at those that are due.
        self._fresh: dict[Visit, None] = {}
        self.n_open = 0

    @property
    def overfull(self) -> bool:
        """Whether more visits are open than may be; the latest should be turned away."""
        return self.n_open > self._max_visits

    def enter(self, visit: Visit) -> None:
        """Takes up a visit, in its own task."""
        visit.task = asyncio.current_task()
        self._fresh[visit] = None
        self.n_open += 1

    def leave(self, visit: Visit) -> None:
        """Forgets a visit; called once for each."""
        self._fresh.pop(visit, None)
        self.n_open -= 1
        self._n_bytes -= visit.in_bytes

    def take(self, n_bytes: int) -> None:
        """Counts a part of a body until its visit ends. Raises `QueueFull`."""
        self._n_bytes += n_bytes
        if self._n_bytes > self._max_bytes:
            raise QueueFull(f"requests of {self._max_bytes} bytes are being answered")

    async def run(self) -> None:
        """Looks after the visits until it is cancelled."""
        while True:
            await asyncio.sleep(GRACE_S)
            self.round(clock.monotonic())

    def round(self, now: float) -> None:
        """Gives every body that has lasted a limit."""
        due = []
        for visit in self._fresh:
            if visit.started_s > now - GRACE_S:
                break
            due.append(visit)
        for visit in due:
            del self._fresh[visit]
            if not visit.body_read:
                left_s = self._body_timeout_s - (now - visit.started_s)
                visit.timer = asyncio.get_running_loop().call_later(
                    max(0.0, left_s), _dawdles, visit, self._body_timeout_s
                )


async def _watch(visit: Visit) -> None:
    while (await visit.receive())["type"] != "http.disconnect":
        pass
    visit.left()


def _dawdles(visit: Visit, body_timeout_s: float) -> None:
    if not visit.body_read:
        visit.end(RequestTimeout(f"the body did not arrive within {body_timeout_s:g} s"))


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is over the limit of {max_bytes} bytes")
