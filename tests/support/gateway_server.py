"""A real uvicorn server with the real gateway app, in a thread of the test process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from shoal.gateway.app import App
from shoal.settings import GatewaySettings
from tests.support.local_submits import CATALOG, LocalSubmits


@dataclass(frozen=True)
class Served:
    """A gateway that listens."""

    url: str
    port: int
    app: App
    submits: LocalSubmits


@contextmanager
def gateway_server(**settings: object) -> Iterator[Served]:
    """Serves the app with a `LocalSubmits` until the block ends."""
    submits = LocalSubmits()
    app = App(GatewaySettings(**settings), lambda: CATALOG, submits)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        app, http="httptools", loop="uvloop", ws="none", access_log=False, log_config=None
    )
    server = uvicorn.Server(config)
    started = threading.Event()
    startup = server.startup

    async def announce(sockets: list[socket.socket] | None = None) -> None:
        await startup(sockets)
        started.set()

    server.startup = announce
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    assert started.wait(10)
    try:
        yield Served(f"http://127.0.0.1:{port}", port, app, submits)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
