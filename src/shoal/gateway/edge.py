"""What one connection may cost: the bounds of heads, of slow clients and of the connections at all.

Owns the limits that uvicorn and its parser lack: the size of a request's head and how long it may
take to arrive, requests sent ahead of their answers, what a slow reader leaves unsent, and the
number of connections. Bodies are bounded where they are read (`visit`). Does not own requests.

The common case, a request that arrives whole, costs a few comparisons. All that has to do with time
is done by one round over the connections (`Edge.run`), so that no connection has a timer. A bound
that was passed is answered where an answer can still be understood, and then the connection is
closed; a reader that stands still is cut off.
"""

from __future__ import annotations

import asyncio
import re
import resource
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from shoal import clock
from shoal.errors import (
    CapacityError,
    HeadTooLarge,
    InvalidRequest,
    PathTooLong,
    RequestTimeout,
    ShoalError,
)
from shoal.gateway.ask import request_id
from shoal.gateway.failures import error_body, error_headers
from shoal.gateway.forms import JSON
from shoal.settings import GatewaySettings

MAX_HEAD_BYTES: Final = 32 * 1024
MAX_HEADERS: Final = 100
MAX_URL_BYTES: Final = 8 * 1024
# Requests that may be sent before the first of them is answered.
MAX_PIPELINED: Final = 16
# A chunked body may carry so much besides its bytes: names of chunks, headers behind its end.
MAX_CHUNK_NOISE_BYTES: Final = 32 * 1024
KEEP_ALIVE_S: Final = 75.0
# What a reader must take in each `write_timeout_s`.
LEAST_READ_BYTES: Final = 64 * 1024
_UPGRADE: Final = re.compile(rb"(?i)\r\nupgrade[ \t]*:")
# Files that the process needs for other things than connections.
_OTHER_FILES: Final = 64


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """The bounds that are settings; see `GatewaySettings`."""

    max_connections: int = 10_000
    head_timeout_s: float = 10.0
    write_timeout_s: float = 30.0
    max_unsent_bytes: int = 256 * 1024 * 1024

    @classmethod
    def of(cls, settings: GatewaySettings) -> EdgeLimits:
        """The limits that the settings ask for."""
        return cls(
            settings.max_connections,
            settings.head_timeout_s,
            settings.write_timeout_s,
            settings.max_unsent_bytes,
        )


def connections_that_fit(wanted: int) -> int:
    """How many connections the process has files for, up to `wanted`.

    Asks the system for more first: without a file no connection can even be refused.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < need:
        more = need if hard == resource.RLIM_INFINITY else min(need, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, more), hard))
            soft = max(soft, more)
        except (ValueError, OSError):  # a system may allow less than it says
            pass
        return max(1, min(wanted, soft - _OTHER_FILES))
    return wanted


class Edge:
    """Looks after all connections of a server."""

    def __init__(self, limits: EdgeLimits) -> None:
        self.limits = limits
        self.refused = 0
        self.cut_off = 0

    async def run(self, connections: Collection[Any]) -> None:
        """Looks at the connections until it is cancelled."""
        limits = self.limits
        pause_s = min(1.0, limits.head_timeout_s / 4, limits.write_timeout_s / 4)
        while True:
            await asyncio.sleep(pause_s)
            self.round(connections, clock.monotonic())

    def round(self, connections: Collection[Any], now: float) -> None:
        """Ends the connections that have waited or stalled for too long."""
        unsent_bytes = 0
        stalled: list[tuple[float, int, BoundedProtocol]] = []
        for connection in [c for c in connections if isinstance(c, BoundedProtocol)]:
            size = connection.transport.get_write_buffer_size()
            if not size:
                connection.keeps_up()
            else:
                since_s = connection.stalled_since(size, now)
                if now - since_s > self.limits.write_timeout_s:
                    self._cut_off(connection)
                    continue
                unsent_bytes += size
                stalled.append((since_s, size, connection))
            if connection.waiting_s(now) > (
                KEEP_ALIVE_S if connection.rests else self.limits.head_timeout_s
            ):
                connection.give_up()
        if unsent_bytes > self.limits.max_unsent_bytes:
            for _, size, connection in sorted(stalled, key=lambda entry: entry[:2]):
                self._cut_off(connection)
                unsent_bytes -= size
                if unsent_bytes <= self.limits.max_unsent_bytes:
                    break

    def _cut_off(self, connection: BoundedProtocol) -> None:
        self.cut_off += 1
        connection.transport.abort()


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with the bounds of this module."""

    def __init__(
        self,
        edge: Edge,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._edge = edge
        self._refusal: ShoalError | None = None
        # Bytes of the head that has begun and not ended, and those with what is being parsed now.
        self._head_bytes = 0
        self._parsed_bytes = 0
        self._noise_bytes = 0
        # What it was seen waiting for, and since when; what it was seen sending, and since when.
        self._waits_for: object = None
        self._waits_since_s = 0.0
        self._sends: object = None
        # Of answers that are sent while they grow; `_passed_bytes` of them or of a whole one had
        # gone by `_unsent_since_s`.
        self.streamed_bytes = 0
        self._passed_bytes = 0
        self._unsent_since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Turns away one connection more than there may be."""
        super().connection_made(transport)
        limit = self._edge.limits.max_connections
        if len(self.connections) > limit:
            self._edge.refused += 1
            self._refuse(CapacityError(f"{limit} connections are open", retry_after_s=1.0))

    def data_received(self, data: bytes) -> None:
        """Parses, and counts what the parser keeps or skips without telling."""
        cycle = self.cycle
        if self._head_bytes or (cycle is not None and cycle.more_body):
            self._parse_rest(data)
            return
        self._parsed_bytes = len(data)
        if data.find(b"pgrade", 0, MAX_HEAD_BYTES) >= 0:
            data = _without_upgrade(data)
        super().data_received(data)
        scope = self.scope
        if scope is not None and "method" not in scope:
            # Where another message ends in the same piece, this one's share of it is not known.
            self._count_head(len(data) if self.cycle is cycle else 1)

    def _parse_rest(self, data: bytes) -> None:
        """Parses what follows on the first piece of a head or a body."""
        cycle, scope = self.cycle, self.scope
        arriving = cycle is not None and cycle.more_body
        body_bytes = len(cycle.body) if arriving else 0
        size = len(data)
        self._parsed_bytes = self._head_bytes + size
        super().data_received(data)
        if self._in_head:
            self._count_head(self._parsed_bytes if self.scope is scope else 1)
        else:
            self._head_bytes = 0
        if arriving and cycle is self.cycle:
            self._count_noise(size, len(cycle.body) - body_bytes, cycle.more_body)

    def _count_head(self, head_bytes: int) -> None:
        """What has come of a head that has begun and not ended."""
        self._head_bytes = head_bytes
        if head_bytes > MAX_HEAD_BYTES:
            self._refusal = _head_too_large()
            self.send_400_response("")

    def _count_noise(self, size: int, grown: int, more: bool) -> None:
        """What comes with a chunked body and is no byte of it."""
        self._noise_bytes = 0 if grown else self._noise_bytes + size
        if self._noise_bytes > MAX_CHUNK_NOISE_BYTES and more:
            self._refusal = InvalidRequest("the body has more of chunk names than of bytes")
            self.send_400_response("")

    @property
    def _in_head(self) -> bool:
        """Whether a head has begun and not ended: the parser makes the scope at its first byte."""
        return self.scope is not None and "method" not in self.scope

    def _unsupported_upgrade_warning(self) -> None:
        """An offer that `_without_upgrade` did not see: the parser has let go of the connection."""
        self.cycle.keep_alive = False
        if any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers):
            self.cycle.more_body = True  # the parser dropped the body
            self._refusal = InvalidRequest("no other protocol is spoken here: leave out `Upgrade`")
            self.send_400_response("")

    def on_headers_complete(self) -> None:
        """Refuses a head over the limits; the exception ends the parsing of the connection."""
        if (
            self._parsed_bytes > MAX_URL_BYTES
            or len(self.headers) > MAX_HEADERS
            or len(self.pipeline) >= MAX_PIPELINED
        ):
            self._refusal = self._head_fault()
            if self._refusal is not None:
                raise self._refusal
        super().on_headers_complete()

    def _head_fault(self) -> ShoalError | None:
        """Which limit the head that is just complete is over; None where it is within all."""
        if len(self.url) > MAX_URL_BYTES:
            return PathTooLong(f"the path is longer than {MAX_URL_BYTES} bytes")
        if len(self.headers) > MAX_HEADERS:
            return HeadTooLarge(f"there are more than {MAX_HEADERS} headers")
        lines_bytes = sum(len(name) + len(value) + 4 for name, value in self.headers)
        if len(self.url) + lines_bytes > MAX_HEAD_BYTES:
            return _head_too_large()
        if len(self.pipeline) >= MAX_PIPELINED:
            return InvalidRequest(f"more than {MAX_PIPELINED} requests before an answer")
        return None

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the name is uvicorn's
        """Says what is wrong where the answer can be understood; closes in any case."""
        error = self._refusal or InvalidRequest("this is no valid HTTP request")
        if self.cycle is None or self.cycle.response_complete:
            self._refuse(error)
        elif self.cycle.more_body and not self.pipeline and not self.cycle.response_started:
            self.cycle.disconnected = True  # the app must not answer, too
            self._refuse(error)
        else:
            self.transport.close()  # an answer now would be taken for that of an earlier request

    def _refuse(self, error: ShoalError) -> None:
        name = request_id(None)
        body = JSON.encode(error_body(error, "openai", name))
        headers = [
            (b"x-request-id", name.encode()),
            (b"content-type", JSON.content_type),
            (b"content-length", b"%d" % len(body)),
            *error_headers(error),
            (b"connection", b"close"),
        ]
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        status = b"HTTP/1.1 %d \r\n" % error.http_status
        self.transport.write(b"%b%b\r\n%b" % (status, lines, body))
        self.transport.close()

    # --- what the round asks

    @property
    def rests(self) -> bool:
        """Whether it has been answered and nothing of a next request is there."""
        return self.cycle is not None and not self._in_head

    def waiting_s(self, now: float) -> float:
        """How long it has waited for the same head to end or to begin; 0 while it is answered."""
        busy = self.cycle is not None and not self.cycle.response_complete
        waits_for: object = None
        if not busy:
            waits_for = self.scope if self._in_head else self.cycle or self
        if waits_for is not self._waits_for or busy:
            self._waits_for, self._waits_since_s = waits_for, now
        return now - self._waits_since_s

    def give_up(self) -> None:
        """Closes a connection that has waited for too long; a half head gets an answer."""
        if self.transport.is_closing():
            return
        if self._in_head:
            timeout_s = self._edge.limits.head_timeout_s
            self._refuse(RequestTimeout(f"the head did not arrive within {timeout_s:g} s"))
        else:
            self.transport.close()

    def stalled_since(self, unsent_bytes: int, now: float) -> float:
        """Since when its reader has taken less than `LEAST_READ_BYTES` of the same answer."""
        passed_bytes = self.streamed_bytes - unsent_bytes
        if self._sends is not self.cycle or passed_bytes - self._passed_bytes >= LEAST_READ_BYTES:
            self._sends, self._passed_bytes, self._unsent_since_s = self.cycle, passed_bytes, now
        return self._unsent_since_s

    def keeps_up(self) -> None:
        """Its reader has taken everything."""
        self._sends = None


def _without_upgrade(data: bytes) -> bytes:
    """Renames `Upgrade` in a head, for the parser drops the body of a request that has it.

    Some clients (Java's) offer HTTP/2 in this way with every request.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nx-not-upgraded:", head) + end + rest


def _head_too_large() -> HeadTooLarge:
    return HeadTooLarge(f"the head is larger than {MAX_HEAD_BYTES} bytes")
