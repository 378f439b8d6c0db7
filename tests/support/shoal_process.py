"""Real `shoal` processes, as a user starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil

from tests.support.pace import limit_s

NULL_ENTRY = """\
id: {id}
tasks: [encode, score, classify]
source: file:///
runtime: "null"
outputs: {{dense: {{dim: 8}}, sparse: {{dim: 8}}}}
scorer: joint
options: {options}
"""

NULL_GENERATOR = """\
id: {id}
tasks: [generate]
source: file:///
runtime: "null"
options: {options}
"""


class ShoalProcess:
    """One `shoal` command; its output is read as it comes, so it never blocks on a full pipe."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("SHOAL_")} | environment
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shoal", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=env,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line for line in iter(self.process.stdout.readline, ""))

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, text: str, timeout_s: float = 60.0) -> str:
        """The first line of output that holds `text`."""
        give_up = time.monotonic() + limit_s(timeout_s)
        while True:
            for line in list(self.lines):
                if text in line:
                    return line
            assert self.process.poll() is None, f"shoal left:\n{self.output}"
            assert time.monotonic() < give_up, f"no {text!r} in:\n{self.output}"
            time.sleep(0.01)

    def ready_url(self) -> str:
        """Waits for the ready line of `shoal serve`."""
        return self.wait_for("shoal is ready at ").split(" at ")[1].split()[0]

    def children(self, mark: str) -> list[psutil.Process]:
        """The processes below this one whose command line holds `mark`."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [p for p in found if mark in " ".join(p.cmdline())]

    def leave(self, number: signal.Signals = signal.SIGINT, timeout_s: float = 30.0) -> int:
        """Signals the process and waits for its end; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.ended(timeout_s)

    def ended(self, timeout_s: float) -> int:
        """Waits for the end of the process; returns the exit status."""
        try:
            status = self.process.wait(limit_s(timeout_s))
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


class Serve(ShoalProcess):
    """`shoal serve` on a free port.

    `models` are null models, `generators` those that generate: their options by id.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        models: dict[str, str] | None = None,
        generators: dict[str, str] | None = None,
        **environment: str,
    ) -> None:
        self.folder = folder
        if models is not None or generators is not None:
            catalog = folder / "catalog"
            catalog.mkdir(parents=True, exist_ok=True)
            for form, entries in ((NULL_ENTRY, models), (NULL_GENERATOR, generators)):
                for name, options in (entries or {}).items():
                    text = form.format(id=name, options=options)
                    (catalog / f"{name}.yaml").write_text(text)
            flags = (*flags, "--catalog", str(catalog))
        super().__init__(
            "serve", "--port", "0", "--data-dir", str(folder / "data"), *flags, **environment
        )
        self.url = self.ready_url()

    def post(
        self, path: str, body: object, timeout_s: float = 60.0, **headers: str
    ) -> httpx.Response:
        return httpx.post(
            f"{self.url}{path}", json=body, headers=headers, timeout=limit_s(timeout_s)
        )
