"""`shoal serve`: broker, gateway and worker on this machine, each in a process of its own.

Owns their order of start and stop, writing the catalog down before they start, restarting what
dies, and the ready line. Every process is the one that a cluster runs; nothing here is on a
request's path.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import secrets
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import uvloop

from shoal.catalog.load import load
from shoal.catalog.schema import Entry
from shoal.catalog.seed import join, mirror
from shoal.catalog.snapshot import Snapshot
from shoal.cli.access import forget_access, write_access
from shoal.cli.endpoint import FILE as ENDPOINT_FILE
from shoal.clock import monotonic
from shoal.errors import OperatorError
from shoal.gateway.listening import listen
from shoal.ipc.child import Backoff, Child, Command
from shoal.queue.connection import Address
from shoal.queue.opening import open_queue
from shoal.queue.server import EmbeddedServer
from shoal.settings import GatewaySettings, ServeSettings, WorkerSettings, child_environment

log = logging.getLogger(__name__)

START_S = 30.0
READY_S = 120.0
READY_LOOK_S = 0.03
READY_ANSWER_S = 5.0
STOP_GRACE_S = 5.0


@dataclass(slots=True)
class Service:
    """A child that is started again when it dies. `started` waits until it can be used."""

    command: Callable[[], Command]
    started: Callable[[], Coroutine[Any, Any, None]] | None = None
    child: Child | None = None
    task: asyncio.Task[None] | None = None


class Supervisor:
    """Keeps services running, in order, until it is told to stop."""

    def __init__(self) -> None:
        self._services: list[tuple[Service, float]] = []
        self.stopping = asyncio.Event()

    async def add(self, service: Service, grace_s: float) -> None:
        """Starts a service and waits until it can be used; it is stopped in reverse order."""
        self._services.append((service, grace_s))
        service.child = await Child.start(service.command())
        service.task = asyncio.create_task(self._keep(service), name=f"keep {service.child.name}")
        if service.started is not None:
            await service.started()

    async def _keep(self, service: Service) -> None:
        backoff = Backoff()
        while service.child is not None:
            begun_s = monotonic()
            status = await service.child.wait()
            if self.stopping.is_set():
                return
            pause_s = backoff.after(monotonic() - begun_s)
            name = service.child.name
            log.error("%s left with status %d; starting it again", name, status)
            if status == 2:  # wrong settings: they will not become right
                self.stopping.set()
                return
            await asyncio.sleep(pause_s)
            service.child = await Child.start(service.command())

    async def stop(self) -> None:
        """Stops every service, the last one first."""
        self.stopping.set()
        for service, grace_s in reversed(self._services):
            if service.child is not None:
                await service.child.stop(grace_s)
            if service.task is not None:
                service.task.cancel()
                await asyncio.gather(service.task, return_exceptions=True)


async def _until(what: str, ready: Callable[[], bool], supervisor: Supervisor) -> None:
    begun_s = monotonic()
    while not ready():
        if supervisor.stopping.is_set() or monotonic() - begun_s > START_S:
            raise OperatorError(f"{what} does not start")
        await asyncio.sleep(0.01)


async def _start_broker(settings: ServeSettings, supervisor: Supervisor) -> Address:
    """Starts the embedded broker; a restarted one listens on the same port."""
    folder = settings.data_dir / "nats"
    token = secrets.token_urlsafe(24)
    server = EmbeddedServer(folder, token)

    def command() -> Command:
        address = server.address()
        port = int(address.url.rpartition(":")[2]) if address else 0
        binary, *arguments = EmbeddedServer(folder, token, port).command()
        environment = child_environment(settings, WorkerSettings, GOMAXPROCS="1")
        return Command("nats-server", [binary, *arguments], environment=environment)

    forget_access(settings.data_dir)  # a killed run's
    for stale in folder.glob("*.ports"):
        stale.unlink()

    async def started() -> None:
        await _until("nats-server", lambda: server.address() is not None, supervisor)

    await supervisor.add(Service(command, started), STOP_GRACE_S)
    address = server.address()
    if address is None:
        raise OperatorError("nats-server does not say where it listens")
    write_access(settings.data_dir, address)
    return address


async def _write_catalog(settings: ServeSettings, snapshot: Snapshot, *, is_ours: bool) -> None:
    """Makes the catalog of the queue that of the folder, before anybody follows it.

    A cluster that others run too is no place for the demo, unless it has no catalog at all.
    """
    queue = await open_queue(settings, name="shoal serve")
    try:
        if is_ours or settings.catalog is not None:
            await mirror(queue.catalog, snapshot.everything)
        else:
            await join(queue.catalog, None)
    finally:
        await queue.close()


async def _start_all(settings: ServeSettings, snapshot: Snapshot, supervisor: Supervisor) -> str:
    """Starts everything; returns the gateway's URL once it is ready."""
    endpoint = _endpoint(settings)
    endpoint.unlink(missing_ok=True)
    is_ours = settings.nats_url is None
    if is_ours:
        address = await _start_broker(settings, supervisor)
        settings = replace(settings, nats_url=address.url, nats_token=address.token)
    settings = replace(settings, endpoint_file=endpoint)
    await _write_catalog(settings, snapshot, is_ours=is_ours)

    def part(name: str, kind: type[GatewaySettings | WorkerSettings]) -> Service:
        environment = child_environment(settings, kind, TOKENIZERS_PARALLELISM="false")
        return Service(lambda: Command(name, [name], module="shoal", environment=environment))

    # The gateway is stopped first (it stops accepting), then the worker, then the broker.
    await supervisor.add(part("worker", WorkerSettings), settings.drain_s + STOP_GRACE_S)
    await supervisor.add(part("gateway", GatewaySettings), settings.shutdown_s + STOP_GRACE_S)
    await _until("the gateway", endpoint.exists, supervisor)
    url = str(json.loads(endpoint.read_text())["url"])
    begun_s = monotonic()
    while not await _is_ready(url):
        if supervisor.stopping.is_set() or monotonic() - begun_s > READY_S:
            raise OperatorError("the worker does not become ready")
        await asyncio.sleep(READY_LOOK_S)
    return url


def _endpoint(settings: ServeSettings) -> Path:
    """The file that the gateway writes its address into."""
    return settings.endpoint_file or settings.data_dir / ENDPOINT_FILE


async def _is_ready(url: str) -> bool:
    """What the gateway says of itself. A status line is no work for an HTTP library."""
    place = urlsplit(url)
    head = f"GET /readyz HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n\r\n"
    try:
        async with asyncio.timeout(READY_ANSWER_S):
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            try:
                writer.write(head.encode())
                status = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
    return status.split()[1:2] == [b"200"]


def examples(snapshot: Snapshot, url: str) -> list[str]:
    """Requests to copy: one for each kind of task on texts that the catalog serves."""

    def first(*tests: Callable[[Entry], bool]) -> Entry | None:
        texts = [e for e in snapshot.entries if "text" in e.inputs]
        fit = [e for test in tests for e in texts if test(e)]
        return fit[0] if fit else None

    def curl(path: str, body: dict[str, Any]) -> str:
        text = json.dumps(body).replace("'", "'\\''")
        return f"curl -s {url}{path} -H 'content-type: application/json' -d '{text}'"

    commands: list[str] = []
    entry = first(
        lambda e: "dense" in e.outputs and e.runtime == "onnx", lambda e: "dense" in e.outputs
    )
    if entry:
        commands.append(curl("/v1/embeddings", {"model": entry.id, "input": "a shoal of fish"}))
    entry = first(
        lambda e: "score" in e.tasks and e.runtime == "onnx", lambda e: "score" in e.tasks
    )
    if entry:
        documents = ["Cats sleep a lot.", "A shoal is a group of fish."]
        body = {"model": entry.id, "query": "what is a shoal?", "documents": documents}
        commands.append(curl("/v1/rerank", body))
    entry = first(
        lambda e: "classify" in e.tasks and e.runtime == "onnx", lambda e: "classify" in e.tasks
    )
    if entry:
        head = entry.heads.get("classify")
        pair = ["A shoal is a group of fish.", "Fish that swim together form a shoal."]
        one = pair if head is not None and head.kind == "pair" else pair[0]
        commands.append(curl("/v1/classify", {"model": entry.id, "inputs": [one]}))
    return commands


def _lock(data_dir: Path) -> IO[str]:
    """Holds the data folder for this process alone."""
    data_dir.mkdir(parents=True, exist_ok=True)
    file = (data_dir / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise OperatorError(
            f"another `shoal serve` uses {data_dir}; stop it or choose another --data-dir"
        ) from error
    return file


async def _serve(settings: ServeSettings) -> int:
    begun_s = monotonic()
    snapshot = load(settings.catalog)
    listen(settings).close()  # a taken port is an error now, not in a child's log
    supervisor = Supervisor()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stopping.set)
    try:
        url = await _start_all(settings, snapshot, supervisor)
        lines = [f"shoal is ready at {url} ({monotonic() - begun_s:.1f} s). Try:"]
        lines += [f"  {command}" for command in examples(snapshot, url)]
        sys.stdout.write("\n".join([*lines, f"  open {url}/docs   (Ctrl-C stops everything)\n"]))
        sys.stdout.flush()
        await supervisor.stopping.wait()
    except OperatorError:
        if not supervisor.stopping.is_set():
            raise
        return 1
    finally:
        forget_access(settings.data_dir)
        await supervisor.stop()
        _endpoint(settings).unlink(missing_ok=True)
    return 0


def serve(settings: ServeSettings) -> int:
    """Runs everything until SIGTERM or SIGINT; returns the exit status."""
    settings = replace(settings, data_dir=settings.data_dir.resolve())
    if settings.cache_dir == WorkerSettings.cache_dir:
        settings = replace(settings, cache_dir=settings.data_dir / "cache")
    with _lock(settings.data_dir):
        return uvloop.run(_serve(settings))
