"""uvicorn, as the gateway runs it.

Owns three departures from the stock server: signals are left to the process; an answer's head and
body, which uvicorn writes one after the other, leave in one system call, for a write to a socket
costs more than the rest of sending an answer; and a request is told when its connection ends. Does
not own the application.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shoal.gateway.visit import LEFT

MAX_JOINED_BYTES = 64 * 1024


class _Joined:
    """A transport whose small writes of one turn of the event loop leave together."""

    __slots__ = ("_parts", "_size_bytes", "_soon", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._soon = asyncio.get_running_loop().call_soon
        self._parts: list[bytes] = []
        self._size_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Keeps small data until the turn ends; large data goes out with what was kept."""
        if not self._parts:
            self._soon(self._flush)
        self._parts.append(data)
        self._size_bytes += len(data)
        if self._size_bytes > MAX_JOINED_BYTES:
            self._flush()

    def writelines(self, parts: Iterable[bytes]) -> None:
        """As `write`."""
        self.write(b"".join(parts))

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        self._size_bytes = 0
        if parts:
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def close(self) -> None:
        """Sends what was kept, then closes."""
        self._flush()
        self._transport.close()


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 over a joining transport, with word of connections that end."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Puts the joining transport between."""
        super().connection_made(cast("asyncio.Transport", _Joined(transport)))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells the open request, if there is one."""
        super().connection_lost(exc)
        if self.cycle is not None:
            left = cast("dict[str, Any]", self.cycle.scope).get(LEFT)
            if left is not None:
                left()


class Server(uvicorn.Server):
    """Leaves signals alone; `on_started` is called once requests are taken."""

    def __init__(self, app: Any, *, shutdown_s: float, on_started: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                loop="uvloop",
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
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
        self._on_started()
