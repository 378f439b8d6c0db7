"""One runtime process: started when it is needed, started again after it has died.

Owns its life, its connection and the pause between restarts. Does not own which models are in it
(`resident`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable, Callable

import psutil

from shoal.bundles.shelf import Home
from shoal.clock import monotonic
from shoal.errors import RuntimeCrashed, RuntimeUnavailable, ShoalError
from shoal.ipc.child import Backoff, Child, Command
from shoal.ipc.client import RuntimeConnection
from shoal.ipc.messages import Hello
from shoal.settings import runtime_environment
from shoal.worker.memory import resident_bytes

log = logging.getLogger(__name__)

HELLO_S = 120.0
STOP_S = 2.0


class RuntimeProcess:
    """A runtime on a device. `on_lost` is called whenever a running process has died.

    base_bytes: what the process held before its first model.

    home: says before each start where the process starts; None: in this very environment. nice:
    how far it stands back behind other processes of the machine, 0 to 19.
    """

    def __init__(
        self,
        runtime: str,
        *,
        device: str,
        threads: int,
        on_lost: Callable[[], None],
        home: Callable[[], Awaitable[Home | None]] | None = None,
        nice: int = 0,
    ) -> None:
        self.runtime = runtime
        self.device = device
        self.hello: Hello | None = None
        self.base_bytes = 0
        self._threads = threads
        self._on_lost = on_lost
        self._home = home
        self._nice = nice
        self._children: list[int] = []
        self._connection: RuntimeConnection | None = None
        self._child: Child | None = None
        self._starting = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._backoff = Backoff()
        self._not_before_s = 0.0
        self._stopping = False
        self._resting = False

    async def connection(self) -> RuntimeConnection:
        """A connection to the running process, which is started when there is none.

        Raises `RuntimeUnavailable` when it cannot start, `RuntimeCrashed` when it dies at once.
        """
        async with self._starting:
            if self._connection is None or self._connection.lost:
                await self._bury()
                await asyncio.sleep(max(0.0, self._not_before_s - monotonic()))
                self._connection = await self._start()
            return self._connection

    @property
    def pid(self) -> int | None:
        """The running process; None when there is none."""
        running = self._connection is not None and not self._connection.lost
        return self._child.pid if running and self._child is not None else None

    @property
    def pids(self) -> list[int]:
        """The running process and the processes that it had when it last loaded a model."""
        return [self.pid, *self._children] if self.pid is not None else []

    def on_loaded(self) -> None:
        """Looks which processes of its own the runtime has: an engine may be several."""
        try:
            self._children = [
                child.pid for child in psutil.Process(self.pid).children(recursive=True)
            ]
        except psutil.Error:
            self._children = []

    def live(self) -> RuntimeConnection:
        """The connection to the process that runs now; nothing is started.

        A process that is started anew has no models, so only a load may start one. Raises
        `RuntimeCrashed`.
        """
        if self._connection is None or self._connection.lost:
            raise RuntimeCrashed(f"the {self.runtime} runtime is not running")
        return self._connection

    async def _bury(self) -> None:
        """Waits until a lost process has ended and everybody knows, before there is another."""
        if self._child is not None and self._watching is not None:
            await self._child.kill()
            await asyncio.shield(self._watching)

    async def _start(self) -> RuntimeConnection:
        if self._stopping:
            raise RuntimeCrashed(f"the {self.runtime} runtime is being stopped")
        home = await self._home() if self._home is not None else None
        ours, theirs = socket.socketpair()
        command = Command(
            f"{self.runtime} runtime",
            [
                *("--fd", str(theirs.fileno())),
                *("--runtime", self.runtime),
                *("--device", self.device.partition("#")[0]),
                *("--threads", str(self._threads)),
                *("--nice", str(self._nice)),
            ],
            module="shoal.runtimes.host",
            python=home.python if home is not None else sys.executable,
            environment=runtime_environment(self._threads, home.environment if home else None),
        )
        begun_s = monotonic()
        try:
            with theirs:
                child = await Child.start(command, pass_fds=[theirs.fileno()])
            connection = await RuntimeConnection.open(ours)
        except (OSError, asyncio.CancelledError):
            ours.close()  # a process that has started ends when it sees that
            raise
        try:
            async with asyncio.timeout(HELLO_S):
                self.hello = await connection.hello
        except (ShoalError, TimeoutError) as error:
            connection.close()
            await child.kill()
            self._not_before_s = monotonic() + self._backoff.after(monotonic() - begun_s)
            if isinstance(error, RuntimeUnavailable):
                raise
            raise RuntimeCrashed(f"the {self.runtime} runtime does not start: {error}") from error
        except asyncio.CancelledError:  # given up in the middle of its start: it must not live on
            connection.close()
            await child.kill()
            raise
        log.info(
            "runtime %s %s on %s ready in %.2f s (pid %d)",
            *(self.runtime, self.hello.version, self.device, monotonic() - begun_s, child.pid),
        )
        self._child, self._children = child, []
        self.base_bytes = resident_bytes([child.pid])
        self._watching = asyncio.create_task(
            self._watch(child, connection, begun_s), name=f"watch {self.runtime} on {self.device}"
        )
        return connection

    async def _watch(self, child: Child, connection: RuntimeConnection, begun_s: float) -> None:
        status = await child.wait()
        connection.close()
        self._connection = None
        if self._stopping or self._resting:
            return
        pause_s = self._backoff.after(monotonic() - begun_s, useful=connection.batches > 0)
        self._not_before_s = monotonic() + pause_s
        log.error(
            "runtime %s on %s died with status %d; again in %.1f s at the earliest",
            *(self.runtime, self.device, status, pause_s),
        )
        self._on_lost()

    async def kill(self) -> None:
        """Ends the process at once, as if it had crashed; it is started again when needed."""
        if self._child is not None:
            await self._child.kill()

    async def rest(self) -> None:
        """Ends a process that is not needed now; it is started again when it is."""
        async with self._starting:
            self._resting = True
            try:
                await self._end()
            finally:
                self._resting = False

    async def stop(self) -> None:
        """Ends the process for good."""
        self._stopping = True
        await self._end()

    async def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._child is not None:
            await self._child.stop(STOP_S)
        if self._watching is not None:
            await self._watching
