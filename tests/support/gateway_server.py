"""A real uvicorn server with the real gateway app, in a thread of the test process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvloop

from shoal.gateway.app import App
from shoal.gateway.edge import EdgeLimits
from shoal.gateway.idempotency import Idempotency
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
    server: Server


@contextmanager
def gateway_server(
    *, send_bytes: int | None = None, idempotency: Idempotency | None = None, **settings: object
) -> Iterator[Served]:
    """Serves the app with a `LocalSubmits` until the block ends.

    send_bytes: about how much the system takes of an answer that nobody reads.
    """
    submits = LocalSubmits()
    chosen = GatewaySettings(**settings)
    app = App(chosen, lambda: CATALOG, submits, idempotency=idempotency)
    listener = socket.socket()
    if send_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.listen(256)
    started = threading.Event()
    limits = EdgeLimits.of(chosen)
    server = Server(app, shutdown_s=2, on_started=started.set, limits=limits)
    thread = threading.Thread(target=_serve, args=(server, listener))
    thread.start()
    assert started.wait(10)
    try:
        yield Served(f"http://127.0.0.1:{port}", port, app, submits, server)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def _serve(server: Server, listener: socket.socket) -> None:
    uvloop.run(server.serve([listener]))
