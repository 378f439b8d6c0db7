"""The process of a server: started beside this one, watched, and gone when this one is.

Owns its life (through `keeper`), its key, its private folder, the end of its log and what it and
its own children hold of memory. Does not own its command line (`command`) or what is said to it
(`contract`).

Every user of the machine reaches a port of it, so the server answers only who knows its key. It
takes the key from its command line, which everyone can read, or from a file of settings: that lies
in a folder that only we can read, and is gone once the server has read it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

import psutil

from shoal.clock import monotonic
from shoal.errors import ModelUnavailable, OutOfMemory
from shoal.runtimes.held import shares_bytes
from shoal.settings import other_environment

log = logging.getLogger(__name__)

READY_S = 600.0
_LOOK_S = 0.1
_END_S = 10.0
_LOG_ENDS_S = 1.0
_TAIL_BYTES = 16384
_TAIL_CHARS = 600
_MODULE = "sglang.launch_server"
_KEEPER = "shoal.runtimes.sglang.keeper"
_KILLED = 128 + signal.SIGKILL
_FAULT = "Traceback (most recent call last)"
_SETTINGS = "key.yaml"

T = TypeVar("T")


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A running server. on_lost: called by a thread when it ends before `stop`.

    key: what it asks of every caller. folder: its private one, which goes with it. lost: set as
    soon as it has ended.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        on_lost: Callable[[], None],
        module: str = _MODULE,
    ) -> None:
        self.key = secrets.token_hex(32)
        self.folder = Path(tempfile.mkdtemp(prefix="shoal-sglang-"))
        self.lost = threading.Event()
        self._name = name
        self._on_lost = on_lost
        self._stopping = False
        self._ready = False
        self._settings = self.folder / _SETTINGS
        self._settings.write_text(json.dumps({"api-key": self.key}), "utf-8")
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            [
                *(sys.executable, "-m", _KEEPER, str(self.folder), module),
                *("--config", str(self._settings), *arguments),
            ],
            stdin=subprocess.PIPE,  # the keeper ends the server when we close it, or are gone
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=other_environment(environment),
        )
        self._log = _End(self._process.stdout, name)
        threading.Thread(target=self._watch, name=f"watch {name}", daemon=True).start()

    def wait_ready(self, ready: Callable[[], T | None]) -> T:
        """Waits until `ready` gives something, and returns that.

        Raises `ModelUnavailable` with the end of its log where the server leaves before, or takes
        more than READY_S; `OutOfMemory` where it was killed by none of its own.
        """
        give_up_s = monotonic() + READY_S
        while (found := self._looked(ready)) is None:
            if monotonic() > give_up_s:
                raise ModelUnavailable(
                    f"{self._name}: the SGLang server does not get ready: {self.tail()}"
                )
            time.sleep(_LOOK_S)
        self._ready = True
        self._settings.unlink()
        return found

    def _looked(self, ready: Callable[[], T | None]) -> T | None:
        """What `ready` gives, if the server has not left before."""
        found = ready()
        status = self._process.poll()
        if status is None:
            return found
        self._log.wait(_LOG_ENDS_S)
        # It also kills itself, once a process of its own has said what it could not do.
        if status == _KILLED and _FAULT not in self._log.text():
            raise OutOfMemory(f"{self._name}: the SGLang server was killed while it loaded")
        raise ModelUnavailable(
            f"{self._name}: the SGLang server left with status {status}: {self.tail()}"
        )

    def tail(self) -> str:
        """The end of its log, as one line."""
        lines = [line.strip() for line in self._log.text().splitlines()]
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
        shutil.rmtree(self.folder, ignore_errors=True)  # the keeper may have been killed

    def _family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self._process.pid)
            return [own, *own.children(recursive=True)]
        return []

    def _watch(self) -> None:
        status = self._process.wait()
        self.lost.set()
        if self._ready and not self._stopping:
            self._log.wait(_LOG_ENDS_S)
            log.error("%s: the server died with status %d: %s", self._name, status, self.tail())
            self._on_lost()


class _End:
    """The last of what a process writes, read as it comes: a log on a disk would have no bound."""

    def __init__(self, output: IO[bytes] | None, name: str) -> None:
        self._output = output
        self._last = b""
        self._reader = threading.Thread(target=self._read, name=f"log {name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        if self._output is None:
            return
        with self._output as output:
            while part := os.read(output.fileno(), _TAIL_BYTES):
                self._last = (self._last + part)[-_TAIL_BYTES:]

    def wait(self, most_s: float) -> None:
        """Waits until all was read that there will be."""
        self._reader.join(most_s)

    def text(self) -> str:
        """What was kept."""
        return self._last.decode("utf-8", "replace")
