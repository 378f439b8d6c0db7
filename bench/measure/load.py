"""Load generators over HTTP that keep what became of every call.

`saturate` is a closed loop: as many calls are always open. `offer` is an open loop: calls start at
moments that were fixed before, however slow the answers are, and latency counts from those moments
(else a slow server would be asked less, and look faster). Both run in the caller's process with the
cyclic garbage collector off; `offer`'s own lag is in the calls, so that a trial can be void.
Does not own what is sent or what the numbers mean.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import uvloop

from measure.figures import quantile

CONNECTIONS = 256
MOST_LAG_S = 0.005
TRIES = 3
SETTLE_S = 0.3  # what was broken off leaves the worker
MOST_S = 60.0


@dataclass(slots=True)
class Call:
    """One call. index: its place in what was sent. Moments in monotonic seconds.

    due_s: when it was to be sent. done_s: infinite while there is no answer 200.
    """

    index: int
    due_s: float
    sent_s: float = math.inf
    done_s: float = math.inf
    status: int = 0

    @property
    def latency_s(self) -> float:
        """From the moment it was due."""
        return self.done_s - self.due_s

    @property
    def lag_s(self) -> float:
        """How late the generator sent it."""
        return self.sent_s - self.due_s


class Wire(asyncio.Protocol):
    """One keep-alive HTTP connection with one call at a time."""

    def __init__(self, on_free: Callable[[Wire], None], on_lost: Callable[[Wire], None]) -> None:
        self.call: Call | None = None
        self._on_free = on_free
        self._on_lost = on_lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self._transport = transport  # type: ignore[assignment]

    def send(self, call: Call, request: bytes) -> None:
        """Starts a call."""
        self.call = call
        call.sent_s = time.monotonic()
        if self._transport is not None:
            self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Ends the call when its answer is complete."""
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 or self.call is None:
            return
        head = bytes(self._buffer[:end]).lower()
        length = int(head.split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
        if len(self._buffer) < end + 4 + length:
            return
        self._buffer.clear()
        call, self.call = self.call, None
        call.status = int(head.split(b" ", 2)[1])
        if call.status == 200:
            call.done_s = time.monotonic()
        self._on_free(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the base's name
        """Whatever is open stays without an answer."""
        self._on_lost(self)

    def abort(self) -> None:
        """Leaves at once: the server withdraws what is open."""
        if self._transport is not None:
            self._transport.abort()


@contextmanager
def _no_pauses() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Crowd:
    """The connections of a trial. `quiet` is set while no call is open."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._host, self._port = host, int(port)
        self.idle: list[Wire] = []
        self.on_free: Callable[[Wire], None] = self.idle.append
        self.quiet = asyncio.Event()
        self._wires: list[Wire] = []
        self._open = 0

    async def connect(self) -> Wire:
        """One more connection."""
        wire = Wire(self._freed, self._lost)
        self._wires.append(wire)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: wire, self._host, self._port)
        return wire

    def send(self, wire: Wire, call: Call, request: bytes) -> None:
        """Starts a call."""
        self._open += 1
        self.quiet.clear()
        wire.send(call, request)

    def _ended(self) -> None:
        self._open -= 1
        if not self._open:
            self.quiet.set()

    def _freed(self, wire: Wire) -> None:
        self.on_free(wire)  # it may start the next call, so that there is no quiet between
        self._ended()

    def _lost(self, wire: Wire) -> None:
        if wire.call is not None:
            self._ended()
        elif wire in self.idle:
            self.idle.remove(wire)

    async def leave(self, patience_s: float) -> None:
        """Waits until it is quiet, at most `patience_s`, and breaks the rest off."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self.quiet.wait()
        for wire in self._wires:
            wire.abort()


async def saturate(
    url: str, requests: Sequence[bytes], concurrency: int, least_s: float, least_calls: int = 0
) -> list[Call]:
    """Keeps `concurrency` calls open, in the order of `requests`, again and again.

    Goes on for `least_s`, and until `least_calls` have been sent. What is open at the end is
    waited for. Raises `SystemExit` after an answer other than 200.
    """
    calls: list[Call] = []
    crowd = _Crowd(url)
    wires = [await crowd.connect() for _ in range(concurrency)]

    def next_call(wire: Wire) -> None:
        now_s = time.monotonic()
        if now_s < end_s or len(calls) < least_calls:
            call = Call(len(calls), now_s)
            calls.append(call)
            crowd.send(wire, call, requests[call.index % len(requests)])

    crowd.on_free = next_call
    with _no_pauses():
        end_s = time.monotonic() + least_s
        for wire in wires:
            next_call(wire)
        await crowd.leave(least_s + MOST_S)
    if bad := {call.status for call in calls} - {200}:
        raise SystemExit(f"unexpected answers: {bad} (0 is none)")
    return calls


async def offer(url: str, schedule: Sequence[tuple[float, bytes]], patience_s: float) -> list[Call]:
    """Sends every (moment_s, request) of the schedule at its moment; the first is near 0.

    Calls without an answer `patience_s` after the last moment are broken off and stay infinite.
    """
    crowd = _Crowd(url)
    opening: set[asyncio.Task[None]] = set()
    crowd.idle += [await crowd.connect() for _ in range(min(CONNECTIONS, len(schedule)))]

    async def open_and_send(call: Call, request: bytes) -> None:
        crowd.send(await crowd.connect(), call, request)

    with _no_pauses():
        begun_s = time.monotonic() + 0.05
        calls = [Call(n, begun_s + at_s) for n, (at_s, _) in enumerate(schedule)]
        for call, (_, request) in zip(calls, schedule, strict=True):
            ahead_s = call.due_s - time.monotonic()
            if ahead_s > 0:
                await asyncio.sleep(ahead_s)
            if crowd.idle:
                crowd.send(crowd.idle.pop(), call, request)
            else:
                task = asyncio.create_task(open_and_send(call, request))
                opening.add(task)
                task.add_done_callback(opening.discard)
        await asyncio.gather(*opening)
        await crowd.leave(patience_s)
    return calls


def lag_s(calls: Sequence[Call]) -> float:
    """How late the generator was, at the 99th percentile."""
    return quantile([call.lag_s for call in calls], 0.99)


def punctual(
    url: str, schedule: Sequence[tuple[float, bytes]], patience_s: float
) -> tuple[list[Call], int]:
    """`offer`, again where the generator lagged; also returns how many trials were void.

    After `TRIES` the last one is returned, void or not: `lag_s` says so.
    """
    for void in range(TRIES):
        calls = uvloop.run(offer(url, schedule, patience_s))
        time.sleep(SETTLE_S)
        if lag_s(calls) <= MOST_LAG_S:
            return calls, void
    return calls, TRIES
