"""The queue inside one process: for tests of what stands on the queue.

Owns the same contract as JetStream, checked by the same suite, with plain dictionaries and the
event loop's timers; its stores are in `memory_stores`. It is never a "local mode": `shoal serve`
runs the real broker.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from shoal.clock import monotonic
from shoal.core.types import Lane
from shoal.errors import QueueFull, QueueUnavailable
from shoal.queue.interface import (
    Control,
    DeadLetters,
    Kept,
    OnBytes,
    OnDelivery,
    OnRefused,
    Payloads,
    QueueLimits,
    Shelf,
)
from shoal.queue.memory_stores import (
    MemoryDeadLetters,
    MemoryKept,
    MemoryPayloads,
    MemoryShelf,
    MemoryStores,
)


@dataclass(slots=True)
class _Stored:
    number: int
    data: bytes
    expires_s: float
    attempts: int = 0


@dataclass(slots=True)
class _Pull:
    owner: MemoryQueue
    left: int
    on_delivery: OnDelivery
    on_end: Callable[[], None]
    guard: asyncio.TimerHandle


@dataclass(slots=True)
class _Line:
    waiting: deque[_Stored]
    held: dict[int, tuple[_Stored, asyncio.TimerHandle]] = field(default_factory=dict)
    pulls: dict[int, _Pull] = field(default_factory=dict)


class MemoryBroker(MemoryStores):
    """What several `MemoryQueue`s share: one pool's lines, inboxes and stores."""

    def __init__(self, limits: QueueLimits) -> None:
        super().__init__(limits)
        self.lines: dict[tuple[str, Lane], _Line] = {}
        self.seen: dict[str, float] = {}
        self.ears: dict[str, list[OnBytes]] = {}

    def line(self, model: str, lane: Lane) -> _Line:
        """The line of (model, lane), made when it is not there."""
        size = self.limits.max_queued_per_line
        return self.lines.setdefault((model, lane), _Line(deque(maxlen=size + 1)))

    def serve(self, line: _Line) -> None:
        """Hands waiting items to open pulls, oldest to oldest."""
        while line.waiting and line.pulls:
            stored = line.waiting.popleft()
            if stored.expires_s <= monotonic():
                continue
            number, pull = next(iter(line.pulls.items()))
            stored.attempts += 1
            delivery = MemoryDelivery(self, line, stored)
            delivery.hold()
            pull.left -= 1
            if pull.left == 0:
                pull.guard.cancel()
                del line.pulls[number]
            pull.on_delivery(delivery)
            if pull.left == 0:
                pull.on_end()


class MemoryDelivery:
    """An item held by a worker; see `shoal.queue.interface.Delivery`."""

    def __init__(self, broker: MemoryBroker, line: _Line, stored: _Stored) -> None:
        self._broker = broker
        self._line = line
        self._stored = stored
        self.data = stored.data
        self.attempt = stored.attempts

    def hold(self) -> None:
        """Starts, or starts anew, the time after which the item comes back."""
        self._release()
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._broker.limits.ack_wait_s, self._give_back)
        self._line.held[self._stored.number] = (self._stored, timer)

    def _release(self) -> bool:
        held = self._line.held.pop(self._stored.number, None)
        if held is None:
            return False
        held[1].cancel()
        return True

    def _give_back(self) -> None:
        if self._release():
            self._line.waiting.appendleft(self._stored)
            self._broker.serve(self._line)

    async def ack(self) -> None:
        """The item is done."""
        self._release()

    async def nak(self, delay_s: float = 0.0, *, untouched: bool = False) -> None:
        """The item is given back after `delay_s`."""
        if not self._release():
            return
        self._stored.attempts -= untouched
        loop = asyncio.get_running_loop()
        self._line.held[self._stored.number] = (
            self._stored,
            loop.call_later(delay_s, self._give_back),
        )

    async def in_progress(self) -> None:
        """Ack-wait begins anew."""
        if self._stored.number in self._line.held:
            self.hold()


class MemoryQueue:
    """`shoal.queue.interface.Queue` on a `MemoryBroker`."""

    def __init__(self, broker: MemoryBroker) -> None:
        limits, self._broker = broker.limits, broker
        self._ears: list[tuple[str, OnBytes]] = []
        self._open = True
        self.inbox = f"inbox.{uuid.uuid4().hex}"
        self.payloads: Payloads = MemoryPayloads(broker.payloads, limits.payload_max_bytes)
        self.answers: Payloads = MemoryPayloads(broker.answers, limits.answers_max_bytes)
        self.dead: DeadLetters = MemoryDeadLetters(broker)
        self.kept: Kept = MemoryKept(broker, broker.kept, limits.kept_max_bytes)
        self.leases: Kept = MemoryKept(broker, broker.leases, limits.leases_max_bytes)
        self._shelf = MemoryShelf(broker)
        self.catalog: Shelf = self._shelf

    @property
    def connected(self) -> bool:
        """Whether the queue is open."""
        return self._open

    async def remove_lines(self, models: Iterable[str]) -> list[str]:
        """Removes the lines that hold nothing."""
        held = {model for model, _ in await self.counts()}
        idle = [model for model in models if model not in held]
        for name in [name for name in self._broker.lines if name[0] in idle]:
            line = self._broker.lines.pop(name)
            for pull in line.pulls.values():
                pull.guard.cancel()
                pull.on_end()
        return idle

    async def counts(self) -> dict[tuple[str, Lane], int]:
        """Items of each line that has some."""
        now = monotonic()
        found: dict[tuple[str, Lane], int] = {}
        for name, line in self._broker.lines.items():
            count = sum(stored.expires_s > now for stored in line.waiting) + len(line.held)
            if count:
                found[name] = count
        return found

    async def submit(
        self,
        model: str,
        lane: Lane,
        data: bytes,
        *,
        item_id: str,
        ttl_s: float,
        on_refused: OnRefused,
    ) -> None:
        """Puts an item in line."""
        broker, now = self._broker, monotonic()
        if not self._open:
            raise QueueUnavailable("the queue is closed")
        while broker.seen and next(iter(broker.seen.values())) < now:
            del broker.seen[next(iter(broker.seen))]
        if item_id in broker.seen:
            return
        line = broker.line(model, lane)
        if len(line.waiting) + len(line.held) >= broker.limits.max_queued_per_line:
            full = QueueFull("this model's queue is full", retry_after_s=1.0)
            asyncio.get_running_loop().call_soon(on_refused, full)
            return
        broker.seen[item_id] = now + broker.limits.duplicate_window_s
        line.waiting.append(_Stored(next(broker.numbers), data, now + ttl_s))
        broker.serve(line)

    async def pull(
        self,
        model: str,
        lane: Lane,
        *,
        max_items: int,
        expires_s: float,
        on_delivery: OnDelivery,
        on_end: Callable[[], None],
    ) -> None:
        """One one-shot pull."""
        if not self._open:
            raise QueueUnavailable("the queue is closed")
        line = self._broker.line(model, lane)
        if any(pull.owner is self for pull in line.pulls.values()):
            raise ValueError(f"{model} {lane} has an open pull")
        number = next(self._broker.numbers)

        def expire() -> None:
            if line.pulls.pop(number, None) is not None:
                on_end()

        guard = asyncio.get_running_loop().call_later(expires_s, expire)
        line.pulls[number] = _Pull(self, max_items, on_delivery, on_end, guard)
        self._broker.serve(line)

    async def listen(self, on_outcome: OnBytes) -> None:
        """Opens the inbox."""
        self._hear(self.inbox, on_outcome)

    async def hear(self, control: Control, on_message: OnBytes) -> None:
        """Listens to a kind of control message."""
        self._hear(control, on_message)

    def _hear(self, subject: str, on_bytes: OnBytes) -> None:
        self._broker.ears.setdefault(subject, []).append(on_bytes)
        self._ears.append((subject, on_bytes))

    async def reply(self, inbox: str, data: bytes) -> None:
        """Sends an outcome."""
        self._say(inbox, data)

    async def tell(self, control: Control, data: bytes) -> None:
        """Sends a control message."""
        self._say(control, data)

    def _say(self, subject: str, data: bytes) -> None:
        if not self._open:
            raise QueueUnavailable("the queue is closed")
        for ear in self._broker.ears.get(subject, []):
            asyncio.get_running_loop().call_soon(ear, data)

    def when_back(self, on_back: Callable[[], Awaitable[None]]) -> None:
        """Never: this broker cannot go away."""

    async def withdraw(self, model: str, lane: Lane) -> None:
        """Ends this process's pull of a line."""
        line = self._broker.line(model, lane)
        for number, pull in list(line.pulls.items()):
            if pull.owner is self:
                pull.guard.cancel()
                del line.pulls[number]
                pull.on_end()

    async def stop_pulling(self) -> None:
        """Withdraws this process's pulls."""
        for line in self._broker.lines.values():
            for number, pull in list(line.pulls.items()):
                if pull.owner is self:
                    pull.guard.cancel()
                    del line.pulls[number]

    async def close(self) -> None:
        """Leaves."""
        await self._shelf.close()
        await self.stop_pulling()
        for subject, ear in self._ears:
            self._broker.ears[subject].remove(ear)
        self._ears.clear()
        self._open = False
