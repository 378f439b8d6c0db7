"""Servers that are measured from within: `shoal serve` with its worker's counters.

Owns where the counters are read, and warming up. Does not own load or what the counters mean.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
from harness import Server, serving

WARM_UP_S = 120.0


@dataclass(frozen=True, slots=True)
class Counters:
    """A worker's counters since its start, over all models."""

    tokens: float = 0.0
    padded_tokens: float = 0.0
    device_s: float = 0.0
    batches: float = 0.0
    batch_items: float = 0.0

    def since(self, before: Counters) -> Counters:
        """What was counted since `before`."""
        return Counters(
            *(getattr(self, f) - getattr(before, f) for f in Counters.__dataclass_fields__)
        )

    @property
    def waste(self) -> float:
        """The share of the computed tokens that was padding."""
        return 1.0 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0


@dataclass(frozen=True, slots=True)
class LoadCounters:
    """A worker's counters of loads. run_s: device seconds of batches, over all models."""

    loads: float = 0.0
    load_s: float = 0.0
    evictions: float = 0.0
    run_s: float = 0.0


_LOAD_NAMES = {
    "shoal_worker_loads_total": "loads",
    "shoal_worker_load_seconds_total": "load_s",
    "shoal_worker_evictions_total": "evictions",
    "shoal_worker_device_seconds_total": "run_s",
}
_NAMES = {
    "shoal_worker_tokens_total": "tokens",
    "shoal_worker_padded_tokens_total": "padded_tokens",
    "shoal_worker_device_seconds_total": "device_s",
    "shoal_worker_batch_items_count": "batches",
    "shoal_worker_batch_items_sum": "batch_items",
}


@dataclass(frozen=True, slots=True)
class Watched:
    """A server and the port of its worker's metrics."""

    server: Server
    metrics_port: int

    @property
    def url(self) -> str:
        """Where it answers."""
        return self.server.url

    def counters(self) -> Counters:
        """The counters now."""
        return Counters(**self._read(_NAMES))

    def loads(self) -> LoadCounters:
        """The counters of loads as of the last heartbeat."""
        return LoadCounters(**self._read(_LOAD_NAMES))

    def _read(self, names: Mapping[str, str]) -> dict[str, float]:
        """The counters of these names, summed over their labels."""
        found = dict.fromkeys(names.values(), 0.0)
        for line in httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics").text.splitlines():
            name = line.partition("{")[0].partition(" ")[0]
            if name in names:
                found[names[name]] += float(line.rsplit(" ", 1)[1])
        return found

    def warm_up(self, models: Sequence[str], devices: int) -> None:
        """Asks every model until each of the devices must have it."""
        end_s = time.monotonic() + WARM_UP_S
        with httpx.Client(timeout=WARM_UP_S) as client:
            for model in models:
                body = msgspec.msgpack.encode({"model": model, "inputs": ["a shoal of fish"] * 8})
                for _ in range(2 * devices):
                    answer = client.post(
                        f"{self.url}/v1/encode",
                        content=body,
                        headers={"content-type": "application/msgpack"},
                    )
                    if answer.status_code != 200 or time.monotonic() > end_s:
                        raise SystemExit(f"{model} does not answer: {answer.text[:200]}")


@contextlib.contextmanager
def several(
    starts: Mapping[str, tuple[Sequence[str], Path]], models: Sequence[str], devices: int
) -> Iterator[dict[str, Watched]]:
    """Servers by name, from their (flags, catalog), started side by side and warmed up."""
    with contextlib.ExitStack() as stack:

        def start(name: str) -> Watched:
            flags, catalog = starts[name]
            server = stack.enter_context(watched(*flags, catalog=catalog))
            server.warm_up(models, devices)
            return server

        with ThreadPoolExecutor(len(starts)) as pool:
            servers = dict(zip(starts, pool.map(start, starts), strict=True))
        yield servers


@contextlib.contextmanager
def watched(*flags: str, catalog: Path) -> Iterator[Watched]:
    """Starts a server with metrics, and stops it at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving("--metrics-port", str(port), *flags, catalog=catalog) as server:
        yield Watched(server, port)
