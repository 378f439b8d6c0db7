"""One HTTP/1.1 connection that notices what a library would hide: bytes nobody asked for."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import cast

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer. Header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class Severed(Exception):
    """The connection ended before the answer was whole. begun: some of it had come."""

    def __init__(self, begun: bool) -> None:
        super().__init__("the connection ended before the answer")
        self.begun = begun


class Connection(asyncio.Protocol):
    """A keep-alive connection with at most one request under way.

    stray_bytes: what came while no answer was due, or after one was whole. epoch: for its owner, to
    remember in which life of the server it was opened.
    """

    def __init__(self) -> None:
        self.stray_bytes = 0
        self.epoch = 0
        self.lost = False
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._waiting: asyncio.Future[Reply] | None = None

    @classmethod
    async def open(cls, port: int) -> Connection:
        """Connects to this machine. Raises OSError."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, "127.0.0.1", port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._waiting is None:
            self.stray_bytes += len(data)
            return
        self._buffer += data
        found = _parse(self._buffer)
        if found is None:
            return
        reply, size = found
        self.stray_bytes += len(self._buffer) - size
        self._buffer.clear()
        waiting, self._waiting = self._waiting, None
        if not waiting.done():
            waiting.set_result(reply)
        if reply.headers.get("connection") == "close":
            self.close()

    def connection_lost(self, _exc: Exception | None) -> None:
        self.lost = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(Severed(bool(self._buffer)))
        self._waiting = None

    def write(self, data: bytes) -> None:
        """Sends bytes as they are."""
        assert self._transport is not None
        self._transport.write(data)

    async def post(self, path: str, body: bytes, headers: dict[str, str]) -> Reply:
        """Sends a request and waits for its answer. Raises `Severed`."""
        if self.lost:
            raise Severed(begun=False)
        self._waiting = asyncio.get_running_loop().create_future()
        self.write(head(path, len(body), headers) + body)
        return await self._waiting

    def pause_reading(self) -> None:
        """Leaves what comes in the kernel, as a client that has stopped reading does."""
        assert self._transport is not None
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Reads again."""
        if self._transport is not None and not self.lost:
            self._transport.resume_reading()

    def close(self) -> None:
        """Leaves; an answer under way is not waited for."""
        self.lost = True
        if self._transport is not None:
            self._transport.close()


def head(path: str, size_bytes: int, headers: dict[str, str]) -> bytes:
    """The head of a POST with a JSON body of `size_bytes`."""
    lines = [
        f"POST {path} HTTP/1.1",
        "host: 127.0.0.1",
        "content-type: application/json",
        f"content-length: {size_bytes}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _parse(buffer: bytearray) -> tuple[Reply, int] | None:
    """The answer at the start of `buffer` and its size in bytes; None while it is not whole."""
    head_end = buffer.find(b"\r\n\r\n")
    if head_end < 0:
        return None
    block = bytes(buffer[:head_end])
    length = _LENGTH.search(block)
    assert length is not None, block
    end = head_end + 4 + int(length[1])
    if len(buffer) < end:
        return None
    first, *lines = block.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    return Reply(int(first.split()[1]), headers, bytes(buffer[head_end + 4 : end])), end
