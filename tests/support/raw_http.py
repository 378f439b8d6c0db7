"""HTTP by hand: bytes that no sane client would send, and readers that do not read."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable

from tests.support.pace import limit_s


def connect(port: int, *, receive_bytes: int | None = None) -> socket.socket:
    """A connection; with `receive_bytes` the system keeps only about so much unread."""
    peer = socket.socket()
    if receive_bytes is not None:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    peer.settimeout(limit_s(10))
    peer.connect(("127.0.0.1", port))
    return peer


def read_all(peer: socket.socket) -> bytes:
    """What comes until the other side closes; a reset is an end, too."""
    parts = []
    try:
        while part := peer.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def exchange(port: int, data: bytes) -> bytes:
    """Sends bytes and reads until the other side closes."""
    with connect(port) as peer:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            peer.sendall(data)
        return read_all(peer)


def post(body: object, *lines: str, path: str = "/v1/encode") -> bytes:
    """A whole request."""
    data = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}", *lines, "", ""]
    return "\r\n".join(head).encode() + data


def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Waits until `condition` holds."""
    give_up = time.monotonic() + limit_s(timeout_s)
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)
