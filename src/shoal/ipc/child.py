"""Child processes: started so that they die with us, stopped in two steps.

Owns starting (through `shoal.ipc.guard`), the polite stop and the forced one. Does not own when to
restart (`Backoff` says how long to wait, the supervisor of each kind decides).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """What to start. A `module` runs in `python`, which may belong to another environment."""

    name: str
    arguments: Sequence[str]
    module: str | None = None
    python: str = sys.executable
    environment: Mapping[str, str] | None = None

    def argv(self) -> list[str]:
        """The guarded command line."""
        kind = ["module", self.module] if self.module else ["program"]
        guard = [self.python, "-m", "shoal.ipc.guard", str(os.getpid())]
        return [*guard, *kind, *self.arguments]


class Child:
    """A running child process. It has its own session: Ctrl-C reaches us, and we decide."""

    def __init__(self, command: Command, process: asyncio.subprocess.Process) -> None:
        self.name = command.name
        self._process = process

    @classmethod
    async def start(cls, command: Command, *, pass_fds: Sequence[int] = ()) -> Child:
        """Starts the command; its output goes where ours goes."""
        process = await asyncio.create_subprocess_exec(
            *command.argv(),
            stdin=asyncio.subprocess.DEVNULL,
            env=command.environment,
            start_new_session=True,
            pass_fds=pass_fds,
        )
        return cls(command, process)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Waits for its end; returns the exit status (negative: the signal that ended it)."""
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """Asks it to leave, and kills it when it has not left after `grace_s`."""
        if self._process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """Ends it at once."""
        self._signal(signal.SIGKILL)
        await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        try:
            self._process.send_signal(number)
        except ProcessLookupError:
            return


class Backoff:
    """How long to wait before a restart: doubling, from `first_s` to `most_s`.

    A run that did something useful, or lasted `healthy_s`, starts the series anew.
    """

    def __init__(self, first_s: float = 0.1, most_s: float = 10.0, healthy_s: float = 30.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._healthy_s = healthy_s
        self._next_s = first_s

    def after(self, ran_s: float, *, useful: bool = False) -> float:
        """The pause after a run of `ran_s` seconds."""
        if useful or ran_s >= self._healthy_s:
            self._next_s = self._first_s
        pause_s = self._next_s
        self._next_s = min(self._most_s, self._next_s * 2)
        return pause_s
