"""uvicorn, as the gateway runs it.

Owns the departures from the stock server: signals are left to the process; an application hands a
whole answer over in one call instead of two messages whose headers are checked one by one, and
takes a body that is there without waiting (`visit.ShortWay`); the open request is told when its
connection ends (`visit.LEFT`); and garbage is collected rarely. Does not own the application, or
the bounds of connections (`edge`).
"""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from shoal.gateway.edge import BoundedProtocol, Edge, EdgeLimits, connections_that_fit
from shoal.gateway.visit import LEFT, PAUSED_BYTES, SHORT_WAY

MAX_JOINED_BYTES = 64 * 1024
_END = b"\r\n"
_LAST = b"connection: close\r\n\r\n"
# A request leaves about a hundred objects that only references in a circle could keep. The stock
# threshold of 700 makes every seventh request pay for a collection, a tenth of a request's cost.
_GARBAGE_OBJECTS = 20_000


class Protocol(BoundedProtocol):
    """HTTP/1.1 within bounds, with a short way out, and word of connections that end."""

    # The request that is being answered; `cycle` is the last that came, which may have to wait.
    answered: RequestResponseCycle | None = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_headers_complete(self) -> None:
        """Begins a request, with the short way out in its scope."""
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is not None and cycle.scope is self.scope:
            cast("dict[str, Any]", self.scope)[SHORT_WAY] = _ShortWay(cycle, self)

    def on_response_complete(self) -> None:
        """Goes on to the next request, without a timer for a connection at rest.

        `Edge.run` closes those that rest for too long.
        """
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells the open request, if there is one."""
        super().connection_lost(exc)
        cycle = self.answered
        if cycle is not None:
            if not cycle.response_complete:
                cycle.disconnected = True
            cycle.message_event.set()
            left = cast("dict[str, Any]", cycle.scope).get(LEFT)
            if left is not None:
                left()


class _ShortWay:
    """`shoal.gateway.visit.ShortWay` past the messages of uvicorn's request."""

    __slots__ = ("_connection", "_cycle")

    def __init__(self, cycle: RequestResponseCycle, connection: BoundedProtocol) -> None:
        self._cycle = cycle
        self._connection = connection

    def streamed(self, n_bytes: int) -> None:
        """So many bytes more are sent of an answer that grows."""
        self._connection.streamed_bytes += n_bytes

    def body(self) -> bytes | None:
        """The whole body; None where it has to be waited for."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected or len(cycle.body) >= PAUSED_BYTES:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        return body

    def answer(self, status: int, head: bytes, body: bytes) -> bool:
        """Sends a whole answer; False to a HEAD, and while the client does not read."""
        cycle = self._cycle
        if cycle.response_started or cycle.flow.write_paused or cycle.scope["method"] == "HEAD":
            return False
        if cycle.disconnected:
            return True
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        start = STATUS_LINE[status], head, _END if cycle.keep_alive else _LAST
        if len(body) > MAX_JOINED_BYTES:
            cycle.transport.write(b"".join(start))
            cycle.transport.write(body)
        else:
            cycle.transport.write(b"".join((*start, body)))
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return True


class Server(uvicorn.Server):
    """Leaves signals alone; `on_started` is called once requests are taken."""

    def __init__(
        self,
        app: Any,
        *,
        shutdown_s: float,
        on_started: Callable[[], None],
        limits: EdgeLimits | None = None,
    ) -> None:
        limits = limits or EdgeLimits()
        fitting = connections_that_fit(limits.max_connections)
        self.edge = Edge(replace(limits, max_connections=fitting))
        self._round: asyncio.Task[None] | None = None
        super().__init__(
            uvicorn.Config(
                app,
                http=cast("type[asyncio.Protocol]", partial(Protocol, self.edge)),
                loop="uvloop",
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                log_level="error",  # else every malformed request is a line of log
                server_header=False,
                date_header=False,
                proxy_headers=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=max(1, int(shutdown_s)),
            )
        )
        self._on_started = on_started

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Takes none: the process decides in which order it leaves."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts, then tells."""
        await super().startup(sockets)
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GARBAGE_OBJECTS, *gc.get_threshold()[1:])
        round_ = self.edge.run(self.server_state.connections)
        self._round = asyncio.create_task(round_, name="gateway-edge")
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes what waits and answers what is open; slow clients are looked after meanwhile."""
        await super().shutdown(sockets)
        if self._round is not None:
            self._round.cancel()
