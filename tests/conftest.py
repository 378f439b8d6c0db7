"""Fixtures with real parts."""

from __future__ import annotations

import asyncio
import gc
import os
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
from tests.support import pace
from tests.support.bundle_builds import built
from tests.support.cache import cache_dir
from tests.support.pace import limit_s
from tests.support.sharing import group_of, longest_first, read_times
from tests.support.shoal_process import Serve
from tests.support.times import Times

TEST_S = 120.0  # for one test with what is made for it, on a fast machine
UNTIL = "TEST_UNTIL"  # seconds since 1970 after which no test begins
# Libraries of linear algebra take all cores and spin while they wait for one another: side by side,
# each test computes with one thread.
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what is not pytest's."""
    parser.addoption("--times", action="store_true", help="print and write where the time goes")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Measures this machine's pace once, and stretches the time limit of tests by it."""
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    if not hasattr(config, "workerinput"):
        pace.measure(getattr(config.option, "numprocesses", None) or 1)
    if config.option.timeout is None:
        config.option.timeout = limit_s(TEST_S)
    config.option.loadscopereorder = False  # `longest_first` has put them in order
    if config.option.times:
        config.pluginmanager.register(Times(), "shoal-times")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than cores: most tests start processes of their own, and wait for them."""
    return 1 + (os.cpu_count() or 1)


def pytest_report_header() -> str:
    """The pace, which explains long limits."""
    return f"pace: {limit_s(1.0):.1f} times as long as a fast machine alone"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Says which tests of a parallel run share a process, and which begin first."""
    if not hasattr(config, "workerinput"):
        return
    times = read_times()
    longest_first(items, times)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(group_of(item, times)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Says by name what was not run where the time for the whole run is over."""
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.fail("not run: the time for the whole run was over", pytrace=False)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is there stays: whoever collects garbage, as runtimes do at each load, walks less."""
    _keep_what_is_there()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The same at the end of each file, for what it has imported."""
    if nextitem is None or nextitem.path != item.path:
        _keep_what_is_there()


def _keep_what_is_there() -> None:
    gc.collect()
    gc.freeze()


class NatsServer:
    """A real nats-server in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.embedded = EmbeddedServer(folder, "test-token")
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.embedded.command())
        give_up = time.monotonic() + limit_s(20)
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
    folder = tmp_path_factory.mktemp("live")
    # Bundles are shared; what the worker learns of costs is its own.
    bundles = folder / "data" / "cache" / "bundles"
    bundles.parent.mkdir(parents=True)
    (cache_dir() / "bundles").mkdir(exist_ok=True)
    bundles.symlink_to(cache_dir() / "bundles")
    server = Serve(folder)
    yield server.url
    assert server.leave() == 0, server.output


@pytest.fixture(scope="session")
def candle_cache() -> Path:
    """A cache folder in which the bundle `candle` is built."""
    folder = cache_dir()
    shelf = Shelf(folder / "bundles", read())
    run(built(shelf, shelf.named("candle")), timeout_s=110)
    return folder


def run(main: Coroutine[Any, Any, None], timeout_s: float = 30.0) -> None:
    """Runs a coroutine test in a loop of its own. timeout_s: on a fast machine."""

    async def bounded() -> None:
        await asyncio.wait_for(main, limit_s(timeout_s))
        await asyncio.sleep(0.01)  # transports close a turn after they are told to

    asyncio.run(bounded())


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Waits until `condition` holds. timeout_s: on a fast machine. Raises TimeoutError."""
    async with asyncio.timeout(limit_s(timeout_s)):
        while not condition():
            await asyncio.sleep(0.01)
