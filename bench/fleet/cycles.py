"""Loads, reloads and evictions of one model in a runtime process of its own.

Owns timing them and reading what the process holds. Does not own which models, or the server.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from shoal.catalog.resolve import model_spec
from shoal.catalog.schema import Entry
from shoal.worker.supervise import RuntimeProcess


@dataclass(frozen=True, slots=True)
class Loads:
    """What loading one model took. held_bytes: of the process after each unload, by cycle."""

    start_s: float
    cold_s: float
    warm_s: list[float]
    model_bytes: int
    held_bytes: list[int]


def measure(entry: Entry, cache_dir: Path, cycles: int) -> Loads:
    """Starts a process, loads the model, and unloads and loads it so many times more."""
    return asyncio.run(_measure(entry, cache_dir, cycles))


async def _measure(entry: Entry, cache_dir: Path, cycles: int) -> Loads:
    process = RuntimeProcess(entry.runtime, device="cpu#0", threads=1, on_lost=lambda: None)
    try:
        spec = await asyncio.to_thread(model_spec, entry, cache_dir)
        begun_s = time.monotonic()
        connection = await process.connection()
        start_s = time.monotonic() - begun_s
        begun_s = time.monotonic()
        loaded = await connection.load(spec)
        cold_s = time.monotonic() - begun_s
        system = psutil.Process(process.pid)
        warm_s: list[float] = []
        held_bytes: list[int] = []
        for _ in range(cycles):
            await connection.unload(entry.key, keep=True)
            held_bytes.append(int(system.memory_info().rss))
            begun_s = time.monotonic()
            await connection.load(spec)
            warm_s.append(time.monotonic() - begun_s)
        return Loads(start_s, cold_s, warm_s, loaded.memory_bytes, held_bytes)
    finally:
        await process.stop()
