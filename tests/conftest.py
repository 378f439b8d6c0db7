"""Fixtures with real parts."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.bundles.definition import read
from shoal.bundles.shelf import Shelf
from shoal.queue.connection import Address
from shoal.queue.server import EmbeddedServer
from tests.support.bundle_builds import built
from tests.support.shoal_process import Serve

# These kill processes and wait for elections and restarts in real time, on whatever machine runs
# them. A second try tells a slow machine from a fault; the report counts the tries.
KILLING = ("test_faults_", "test_serve_life", "test_queue_restart", "chaos")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the tests that kill processes one second try."""
    for item in items:
        if any(mark in item.nodeid for mark in KILLING):
            item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=1))


class NatsServer:
    """A real nats-server in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.embedded = EmbeddedServer(folder, "test-token")
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.embedded.command())
        give_up = time.monotonic() + 20
        while (address := self.embedded.address()) is None:
            assert self.process.poll() is None, "nats-server left"
            assert time.monotonic() < give_up, "nats-server does not listen"
            time.sleep(0.01)
        self.address: Address = address
        port = int(address.url.rpartition(":")[2])
        self.embedded = EmbeddedServer(self.embedded.folder, self.embedded.token, port)

    def stop(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One nats-server for the session; tests use pools of their own in it."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def live_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a `shoal serve` with the demo models."""
    server = Serve(tmp_path_factory.mktemp("live"))
    yield server.url
    assert server.leave() == 0, server.output


@pytest.fixture(scope="session")
def candle_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder in which the bundle `candle` is built."""
    folder = tmp_path_factory.mktemp("candle")
    shelf = Shelf(folder / "bundles", read())
    run(built(shelf, shelf.named("candle")), timeout_s=110)
    return folder


def run(main: Coroutine[Any, Any, None], timeout_s: float = 30.0) -> None:
    """Runs a coroutine test in a loop of its own."""

    async def bounded() -> None:
        await asyncio.wait_for(main, timeout_s)
        await asyncio.sleep(0.01)  # transports close a turn after they are told to

    asyncio.run(bounded())


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Waits until `condition` holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
