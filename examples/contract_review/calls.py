"""The calls of the agent, each with a note of when it ran.

Owns the notes, how many calls are in flight, and the workload file. Does not own what is called
(`agent`) or how notes are drawn (`timeline`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shoal.client import AsyncClient

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """A request that was answered. Times are seconds since the first one."""

    document: str
    step: str
    model: str
    start_s: float
    end_s: float
    inputs: int
    input_bytes: int


class Desk:
    """A client, and the calls that were made through it.

    max_in_flight: with 1, each call waits for the one before it.
    """

    def __init__(self, client: AsyncClient, max_in_flight: int) -> None:
        self.client = client
        self.calls: list[Call] = []
        self._turns = asyncio.Semaphore(max_in_flight)
        self._began_s: float | None = None

    async def ask(
        self,
        request: Callable[[], Awaitable[T]],
        by: tuple[str, str, str],
        inputs: Sequence[str | bytes],
    ) -> T:
        """The answer. by: document, step and model; inputs: what is sent, for the note."""
        async with self._turns:
            start_s = self._now_s()
            answer = await request()
        size = sum(len(one.encode() if isinstance(one, str) else one) for one in inputs)
        self.calls.append(Call(*by, start_s, self._now_s(), len(inputs), size))
        return answer

    def _now_s(self) -> float:
        now_s = time.monotonic()
        if self._began_s is None:
            self._began_s = now_s
        return now_s - self._began_s


def write_workload(calls: Iterable[Call], path: Path) -> None:
    """One JSON object a line, in order of time; `shoal plan` reads it as a trace."""
    rows = (
        {
            "time_s": round(call.start_s, 4),
            "model": call.model,
            "step": call.step,
            "inputs": call.inputs,
            "input_bytes": call.input_bytes,
        }
        for call in sorted(calls, key=lambda call: call.start_s)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
