"""A broker, gateways and workers as processes of their own, to be broken one by one."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from tests.conftest import NatsServer
from tests.support.pace import limit_s
from tests.support.ports import free_port
from tests.support.shoal_process import NULL_ENTRY, ShoalProcess

START_S = 30.0
MODELS = {"echo": "{}", "slow": "{sleep_s: 0.3}"}


class Fleet:
    """Real processes on one broker. A gateway keeps its port over restarts.

    models: options of null models by id. url: of a broker that somebody else runs; without it the
    fleet has a nats-server of its own. epochs: of each gateway, odd while it is
    going or gone. late_s: for how long each was stopped, in all. shutdown_s: on a fast machine.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        gateways: int = 1,
        workers: int = 1,
        models: Mapping[str, str] = MODELS,
        url: str | None = None,
        token: str = "test-token",  # noqa: S107
        worker_flags: tuple[str, ...] = (),
        shutdown_s: float = 10.0,
    ) -> None:
        catalog = folder / "catalog"
        catalog.mkdir(parents=True)
        for name, options in models.items():
            (catalog / f"{name}.yaml").write_text(NULL_ENTRY.format(id=name, options=options))
        self.folder = folder
        self.nats = NatsServer(folder / "nats") if url is None else None
        address = url or self.nats.address.url
        self._shared = ("--nats-url", address, "--catalog", str(catalog), *flags)
        self._token = token
        self._worker_flags = worker_flags
        self._shutdown_s = shutdown_s
        self._old: list[ShoalProcess] = []
        self.ports = [free_port() for _ in range(gateways)]
        self.epochs = [0] * gateways
        self.late_s = [0.0] * gateways
        self.workers = [self._worker(i) for i in range(workers)]
        self.gateways = [self._gateway(i) for i in range(gateways)]
        try:
            for process in self.workers:
                process.wait_for("ready in")
            for process in self.gateways:
                process.wait_for("gateway listens on")
        except AssertionError:
            self.close()
            raise

    def _gateway(self, i: int) -> ShoalProcess:
        flags = ("--port", str(self.ports[i]), "--shutdown-s", str(limit_s(self._shutdown_s)))
        return ShoalProcess("gateway", *self._shared, *flags, SHOAL_NATS_TOKEN=self._token)

    def _worker(self, i: int) -> ShoalProcess:
        flags = ("--devices", "cpu:1", "--name", f"worker-{i}", *self._worker_flags)
        cache = ("--cache-dir", str(self.folder / f"cache-{i}"))
        return ShoalProcess("worker", *self._shared, *flags, *cache, SHOAL_NATS_TOKEN=self._token)

    def runtimes(self, worker: int = 0) -> list[psutil.Process]:
        """The runtime processes of a worker that live."""
        while True:
            try:
                found = self.workers[worker].children("shoal.runtimes.host")
                return [p for p in found if p.status() != psutil.STATUS_ZOMBIE]
            except psutil.NoSuchProcess:  # one ended while we looked
                continue

    def kill_runtime(self, worker: int = 0) -> None:
        """SIGKILL; the worker starts another."""
        for process in self.runtimes(worker):
            process.kill()

    def end_worker(self, i: int, number: signal.Signals = signal.SIGKILL) -> int:
        """Signals a worker and waits for its end; returns its exit status."""
        status = self.workers[i].leave(number)
        self._old.append(self.workers[i])
        return status

    def start_worker(self, i: int) -> None:
        """Starts a worker in place of one that has ended, and waits until it serves."""
        self._start(self.workers, i, self._worker, "ready in")

    def end_gateway(self, i: int, number: signal.Signals = signal.SIGKILL) -> int:
        """Signals a gateway and waits for its end; returns its exit status."""
        self.epochs[i] += 1
        status = self.gateways[i].leave(number)
        self._old.append(self.gateways[i])
        return status

    def start_gateway(self, i: int) -> None:
        """Starts a gateway on the port of one that has ended, and waits until it listens."""
        self._start(self.gateways, i, self._gateway, "gateway listens on")
        self.epochs[i] += 1

    def _start(
        self,
        group: list[ShoalProcess],
        i: int,
        make: Callable[[int], ShoalProcess],
        mark: str,
    ) -> None:
        """Starts a process, again and again while it leaves because the broker is away."""
        give_up = time.monotonic() + limit_s(START_S)
        while True:
            group[i] = make(i)
            try:
                group[i].wait_for(mark)
            except AssertionError:
                if group[i].process.poll() != 1 or time.monotonic() > give_up:
                    raise
                group[i].ended(5)
                self._old.append(group[i])
            else:
                return

    @property
    def output(self) -> str:
        """The last lines of every process, for a failed test."""
        alive = [*self.workers, *self.gateways]
        every = [*(p for p in self._old if p not in alive), *alive]
        return "\n".join(f"--- {p.process.args}\n{''.join(p.lines[-40:])}" for p in every)

    def tracebacks(self) -> list[str]:
        """The tracebacks that any process has printed."""
        found = []
        for process in {id(p): p for p in (*self._old, *self.workers, *self.gateways)}.values():
            lines = list(process.lines)
            starts = [i for i, line in enumerate(lines) if line.startswith("Traceback")]
            found += ["".join(lines[max(0, i - 1) : i + 40]) for i in starts]
        return found

    def close(self) -> None:
        """Ends everything that still runs."""
        for process in (*self.gateways, *self.workers):
            process.process.send_signal(signal.SIGCONT)
            process.leave(signal.SIGKILL)
        if self.nats is not None:
            self.nats.stop()
