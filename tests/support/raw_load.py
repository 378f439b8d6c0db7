"""Many requests over a few raw connections that stay open, each waiting for its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import uvloop


class _Caller(asyncio.Protocol):
    """One connection; a request is (its bytes, the status that its answer must have)."""

    def __init__(self, next_request: Callable[[], tuple[bytes, int] | None]) -> None:
        self._next_request = next_request
        self._got = bytearray()
        self._status = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def _send(self) -> None:
        request = self._next_request()
        if request is None:
            self._transport.close()
            self.done.set_result(None)
            return
        data, status = request
        self._status = b"HTTP/1.1 %d " % status
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._got += data
        end = self._got.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._got[:end]).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(self._got) < end + 4 + length:
            return
        if not self._got.startswith(self._status):
            self.done.set_exception(AssertionError(f"want {self._status!r}: {self._got[:500]!r}"))
            self._transport.close()
            return
        del self._got[: end + 4 + length]
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(AssertionError(f"the connection was closed: {exc}"))


async def _drive(
    port: int, make: Callable[[int], tuple[bytes, int]], numbers: range, callers: int
) -> None:
    left = iter(numbers)

    def next_request() -> tuple[bytes, int] | None:
        n = next(left, None)
        return None if n is None else make(n)

    loop = asyncio.get_running_loop()
    made = [
        (await loop.create_connection(lambda: _Caller(next_request), "127.0.0.1", port))[1]
        for _ in range(callers)
    ]
    await asyncio.gather(*(caller.done for caller in made))


def drive(
    port: int, make: Callable[[int], tuple[bytes, int]], numbers: range, callers: int = 48
) -> None:
    """Sends `make(n)` for every number; a wrong status or a lost connection is an error."""
    uvloop.run(_drive(port, make, numbers, callers))
