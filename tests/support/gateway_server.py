"""A real uvicorn server with the real gateway app, in a thread of the test process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvloop

from shoal.gateway.app import App
from shoal.gateway.server import Server
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
    listener.listen(256)
    started = threading.Event()
    server = Server(app, shutdown_s=2, on_started=started.set)
    thread = threading.Thread(target=_serve, args=(server, listener))
    thread.start()
    assert started.wait(10)
    try:
        yield Served(f"http://127.0.0.1:{port}", port, app, submits)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def _serve(server: Server, listener: socket.socket) -> None:
    uvloop.run(server.serve([listener]))
