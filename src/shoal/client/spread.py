"""Connections of the clients: a stack of one-connection transports.

Owns how many connections there are and which one a request takes. httpx's own pool looks at every
connection for every request, which at 64 concurrent requests costs several times the request
itself; a pool of one connection has nothing to look through. Answers that are read as they grow are
few and long, so httpx's own pool has those. Does not own HTTP (httpx).
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable

import httpx

# An extension of requests whose answer is handed out before its end.
GROWING = "shoal.growing"
_ONE = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=30.0)


class Spread(httpx.BaseTransport):
    """At most `max_connections`; a thread that finds none free waits."""

    def __init__(self, max_connections: int, verify: ssl.SSLContext) -> None:
        self._free: list[httpx.HTTPTransport] = []
        self._turns = threading.BoundedSemaphore(max_connections)
        self._make: Callable[[], httpx.HTTPTransport] = lambda: httpx.HTTPTransport(
            verify=verify, limits=_ONE
        )
        self._growing = httpx.HTTPTransport(
            verify=verify, limits=httpx.Limits(max_connections=max_connections)
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """The answer, read to its end unless it grows."""
        if request.extensions.get(GROWING):
            return self._growing.handle_request(request)
        with self._turns:
            transport = self._free.pop() if self._free else self._make()
            whole = False
            try:
                response = transport.handle_request(request)
                response.read()
                whole = True
            finally:
                if whole:
                    self._free.append(transport)
                else:
                    transport.close()  # half an answer may be left in it
        return response

    def close(self) -> None:
        """Closes the connections."""
        while self._free:
            self._free.pop().close()
        self._growing.close()


class AsyncSpread(httpx.AsyncBaseTransport):
    """At most `max_connections`; a task that finds none free waits."""

    def __init__(self, max_connections: int, verify: ssl.SSLContext) -> None:
        self._free: list[httpx.AsyncHTTPTransport] = []
        self._turns = asyncio.BoundedSemaphore(max_connections)
        self._make: Callable[[], httpx.AsyncHTTPTransport] = lambda: httpx.AsyncHTTPTransport(
            verify=verify, limits=_ONE
        )
        self._growing = httpx.AsyncHTTPTransport(
            verify=verify, limits=httpx.Limits(max_connections=max_connections)
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The answer, read to its end unless it grows."""
        if request.extensions.get(GROWING):
            return await self._growing.handle_async_request(request)
        async with self._turns:
            transport = self._free.pop() if self._free else self._make()
            whole = False
            try:
                response = await transport.handle_async_request(request)
                await response.aread()
                whole = True
            finally:
                if whole:
                    self._free.append(transport)
                else:
                    await transport.aclose()  # half an answer may be left in it
        return response

    async def aclose(self) -> None:
        """Closes the connections."""
        while self._free:
            await self._free.pop().aclose()
        await self._growing.aclose()
