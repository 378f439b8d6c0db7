"""What every benchmark script shares: options, a server of our own, load, tables and the JSON file.

Speaks to Shoal over HTTP and reads CPU times from the operating system; imports nothing of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table


@dataclass
class Report:
    """Rows of a table, and the named numbers that later runs are compared by."""

    title: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    headline: dict[str, float] = field(default_factory=dict)

    def add(self, **row: Any) -> None:
        """Adds a row."""
        self.rows.append(row)

    def _parts(self) -> list[tuple[list[str], list[dict[str, Any]]]]:
        """Rows with the same columns, as tables of their own."""
        parts: list[tuple[list[str], list[dict[str, Any]]]] = []
        for row in self.rows:
            if not parts or not (set(row) <= set(parts[-1][0]) or set(row) >= set(parts[-1][0])):
                parts.append((list(row), []))
            names, rows = parts[-1]
            names += [name for name in row if name not in names]
            rows.append(row)
        return parts

    def finish(self, options: argparse.Namespace) -> None:
        """Prints the table, and writes the file that `--json` names."""
        self.show()
        self.save(options)

    def show(self) -> None:
        """Prints the table and the headline."""
        console = Console(width=160)
        for n, (names, rows) in enumerate(self._parts()):
            table = Table(*names, title=None if n else self.title, title_justify="left")
            for row in rows:
                table.add_row(*(_cell(row.get(name, "")) for name in names))
            console.print(table)
        for name, number in self.headline.items():
            console.print(f"{name} = {number:.4g}")

    def save(self, options: argparse.Namespace) -> None:
        """Writes the file that `--json` names."""
        if options.json:
            data = {"headline": self.headline, "rows": self.rows, "machine": machine()}
            options.json.write_text(json.dumps(data, indent=2) + "\n")


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def options(description: str | None, parts: int = 0) -> argparse.Namespace:
    """The options of every script; one of several parts also has `--part`, all when left out."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="under a minute, rougher numbers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    if parts:
        numbers = range(1, parts + 1)
        parser.add_argument(
            "--part",
            type=int,
            action="append",
            choices=numbers,
            metavar="N",
            help=f"run part N of {parts} only; may be repeated",
        )
    return parser.parse_args()


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


class Server:
    """A running `shoal serve` in a folder of its own."""

    def __init__(
        self, process: subprocess.Popen[bytes], url: str, ready_s: float, folder: Path
    ) -> None:
        self.process = process
        self.folder = folder
        self.url = url
        self.ready_s = ready_s

    def parts(self) -> dict[str, list[psutil.Process]]:
        """Its processes by what they are: gateway, broker, worker, runtime."""
        found: dict[str, list[psutil.Process]] = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            line = " ".join(child.cmdline())
            for name, mark in _MARKS:
                if mark in line:
                    found.setdefault(name, []).append(child)
                    break
        return found

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, user and system, by part."""
        return {
            name: sum(sum(p.cpu_times()[:2]) for p in processes)
            for name, processes in self.parts().items()
        }


_MARKS = (
    ("runtime", "shoal.runtimes.host"),
    ("gateway", "module shoal gateway"),
    ("worker", "module shoal worker"),
    ("broker", "nats.conf"),
)


@contextlib.contextmanager
def serving(*flags: str, catalog: Path | None = None) -> Iterator[Server]:
    """Starts `shoal serve` on a free port and stops it at the end."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        command = [sys.executable, "-m", "shoal", "serve", "--port", "0", "--data-dir", folder]
        command += ["--log-level", "warning", *flags]
        if catalog is not None:
            command += ["--catalog", str(catalog)]
        begun_s = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            line = process.stdout.readline().decode() if process.stdout else ""
            if " at http" not in line:
                raise SystemExit("shoal serve did not start")
            url = line.split(" at ", 1)[1].split()[0]
            yield Server(process, url, time.monotonic() - begun_s, Path(folder))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


@dataclass
class Load:
    """What a closed loop did. latencies_s in order of completion."""

    requests: int
    took_s: float
    latencies_s: list[float]

    def quantile_ms(self, q: float) -> float:
        """A latency quantile in milliseconds."""
        ordered = sorted(self.latencies_s)
        return 1e3 * ordered[min(len(ordered) - 1, int(q * len(ordered)))]


class Connection(asyncio.Protocol):
    """One keep-alive HTTP connection that sends the next request when an answer is complete."""

    def __init__(
        self, next_body: Callable[[], bytes | None], done: Callable[[float], None]
    ) -> None:
        self._next_body = next_body
        self._done = done
        self._buffer = b""
        self._sent_s = 0.0
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the first request."""
        self._transport = transport
        self._send()

    def _send(self) -> None:
        request = self._next_body()
        if request is None:
            self._transport.close()
            if not self.finished.done():
                self.finished.set_result(None)
            return
        self._sent_s = time.monotonic()
        self._transport.write(request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        """Reads answers; anything but a 200 ends the run."""
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        if not head.startswith(b"HTTP/1.1 200"):
            self._transport.close()
            self.finished.set_exception(SystemExit(f"unexpected answer: {self._buffer[:400]!r}"))
            return
        length = int(head.lower().split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        self._done(time.monotonic() - self._sent_s)
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        """A lost connection ends the run."""
        if not self.finished.done():
            self.finished.set_exception(SystemExit(f"the server closed the connection: {exc}"))


def http_request(url: str, path: str, body: bytes, content_type: str) -> bytes:
    """The bytes of a POST that asks for an answer of the same type."""
    host = url.removeprefix("http://")
    return (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: {content_type}\r\n"
        f"accept: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body


async def closed_loop(url: str, requests: Iterable[bytes], concurrency: int) -> Load:
    """Sends `requests` over `concurrency` connections, each waiting for its answer."""
    loop = asyncio.get_running_loop()
    host, port = url.removeprefix("http://").split(":")
    queue = iter(requests)
    latencies_s: list[float] = []
    begun_s = time.monotonic()
    connections = [
        (
            await loop.create_connection(
                lambda: Connection(lambda: next(queue, None), latencies_s.append), host, int(port)
            )
        )[1]
        for _ in range(concurrency)
    ]
    await asyncio.gather(*(c.finished for c in connections))
    return Load(len(latencies_s), time.monotonic() - begun_s, latencies_s)


def median(numbers: Sequence[float]) -> float:
    """The median."""
    return statistics.median(numbers)
