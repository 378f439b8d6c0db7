"""The process of a server: started beside this one, watched, and gone when this one is.

Owns its life (through `keeper`), its log and what it and its own children hold of memory. Does not
own its command line (`command`) or what is said to it (`contract`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import psutil

from shoal.clock import monotonic
from shoal.errors import ModelUnavailable, OutOfMemory
from shoal.runtimes.held import shares_bytes
from shoal.settings import other_environment

log = logging.getLogger(__name__)

READY_S = 600.0
_LOOK_S = 0.1
_END_S = 10.0
_TAIL_BYTES = 8192
_TAIL_CHARS = 600
_MODULE = "sglang.launch_server"
_KEEPER = "shoal.runtimes.sglang.keeper"
_KILLED = 128 + signal.SIGKILL


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A running server. on_lost: called by a thread when it ends before `stop`."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        on_lost: Callable[[], None],
        module: str = _MODULE,
    ) -> None:
        self._name = name
        self._on_lost = on_lost
        self._stopping = False
        self._ready = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the server
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-m", _KEEPER, module, *arguments],
            stdin=subprocess.PIPE,  # the keeper ends the server when we close it, or are gone
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=other_environment(environment),
        )
        threading.Thread(target=self._watch, name=f"watch {name}", daemon=True).start()

    def wait_ready(self, ready: Callable[[], bool]) -> None:
        """Waits until `ready` says so.

        Raises `ModelUnavailable` with the end of its log where the server leaves before, or takes
        more than READY_S; `OutOfMemory` where it was killed.
        """
        give_up_s = monotonic() + READY_S
        while not ready():
            status = self._process.poll()
            if status == _KILLED:
                raise OutOfMemory(f"{self._name}: the SGLang server was killed while it loaded")
            if status is not None or monotonic() > give_up_s:
                why = f"left with status {status}" if status is not None else "does not get ready"
                raise ModelUnavailable(f"{self._name}: the SGLang server {why}: {self.tail()}")
            time.sleep(_LOOK_S)
        self._ready = True

    def tail(self) -> str:
        """The end of its log, as one line."""
        size = os.fstat(self._log.fileno()).st_size
        data = os.pread(self._log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
        return "; ".join(line for line in lines if line)[-_TAIL_CHARS:]

    def memory_bytes(self) -> int:
        """What it and its children hold of the host's memory, shared pages counted once."""
        return shares_bytes(self._family())

    def stop(self) -> None:
        """Ends it and its children, and returns when they are gone."""
        self._stopping = True
        family = self._family()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        psutil.wait_procs(family, timeout=_END_S)
        self._log.close()

    def _family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self._process.pid)
            return [own, *own.children(recursive=True)]
        return []

    def _watch(self) -> None:
        status = self._process.wait()
        if self._ready and not self._stopping:
            log.error("%s: the server died with status %d: %s", self._name, status, self.tail())
            self._on_lost()
