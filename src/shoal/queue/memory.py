"""The queue inside one process: for tests of what stands on the queue.

Owns the same contract as JetStream, checked by the same suite, with plain dictionaries and the
event loop's timers. It is never a "local mode": `shoal serve` runs the real broker.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from shoal.clock import monotonic
from shoal.core.types import Lane
from shoal.errors import QueueFull, QueueUnavailable
from shoal.queue.interface import (
    Buried,
    Control,
    DeadLetters,
    Kept,
    KeptRecord,
    OnBytes,
    OnDelivery,
    OnRefused,
    Payloads,
    QueueLimits,
)
from shoal.queue.payloads import check, reference
from shoal.wire.envelope import DeadLetter, PayloadRef


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


class MemoryBroker:
    """What several `MemoryQueue`s share: one pool's lines, inboxes and payloads."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.lines: dict[tuple[str, Lane], _Line] = {}
        self.seen: dict[str, float] = {}
        self.ears: dict[str, list[OnBytes]] = {}
        self.payloads: dict[str, bytes] = {}
        self.numbers = itertools.count(1)
        self.dead: dict[int, DeadLetter] = {}
        self.dead_numbers = itertools.count(1)
        self.kept: dict[str, tuple[KeptRecord, float]] = {}

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

    async def nak(self, delay_s: float = 0.0) -> None:
        """The item is given back after `delay_s`."""
        if not self._release():
            return
        loop = asyncio.get_running_loop()
        self._line.held[self._stored.number] = (
            self._stored,
            loop.call_later(delay_s, self._give_back),
        )

    async def in_progress(self) -> None:
        """Ack-wait begins anew."""
        if self._stored.number in self._line.held:
            self.hold()


class MemoryPayloads:
    """`Payloads` in a dictionary."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker

    async def ensure(self) -> None:
        """The dictionary is there."""

    async def put(self, data: bytes) -> PayloadRef:
        """Keeps `data`."""
        held_bytes = sum(len(d) for d in self._broker.payloads.values())
        if held_bytes + len(data) > self._broker.limits.payload_max_bytes:
            raise QueueUnavailable("the payload store is full")
        ref = reference(data)
        self._broker.payloads[ref.key] = data
        return ref

    async def get(self, ref: PayloadRef) -> bytes:
        """The bytes of `ref`."""
        if ref.key not in self._broker.payloads:
            raise QueueUnavailable(f"payload {ref.key} is gone")
        return check(ref, self._broker.payloads[ref.key])

    async def delete(self, ref: PayloadRef) -> None:
        """Forgets `ref`."""
        self._broker.payloads.pop(ref.key, None)


class MemoryDeadLetters:
    """`DeadLetters` in a list."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker

    async def ensure(self) -> None:
        """The dictionary is there."""

    async def bury(self, letter: DeadLetter) -> None:
        """Keeps a letter; the oldest make room."""
        dead, limits = self._broker.dead, self._broker.limits
        dead[next(self._broker.dead_numbers)] = letter
        while len(dead) > limits.dead_max_letters:
            del dead[next(iter(dead))]

    async def read(self, first: int = 0, most: int = 1000) -> list[Buried]:
        """Letters in the order of their numbers."""
        numbers = [n for n in self._broker.dead if n >= first][:most]
        return [Buried(n, self._broker.dead[n]) for n in numbers]

    async def drop(self, number: int) -> bool:
        """Forgets a letter."""
        return self._broker.dead.pop(number, None) is not None


class MemoryKept:
    """`Kept` in a dictionary."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker

    async def ensure(self) -> None:
        """The dictionary is there."""

    async def claim(self, key: str, data: bytes, ttl_s: float) -> int | None:
        """Keeps `data` where there is nothing."""
        return await self.replace(key, data, ttl_s, 0)

    async def get(self, key: str) -> KeptRecord | None:
        """The record of a key."""
        record, expires_s = self._broker.kept.get(key, (None, 0.0))
        if record is not None and expires_s <= monotonic():
            del self._broker.kept[key]
            return None
        return record

    async def replace(self, key: str, data: bytes, ttl_s: float, revision: int) -> int | None:
        """Keeps `data` in the place of a revision."""
        found = await self.get(key)
        if (found.revision if found else 0) != revision:
            return None
        others = sum(len(r.data) for k, (r, _) in self._broker.kept.items() if k != key)
        if others + len(data) > self._broker.limits.kept_max_bytes:
            raise QueueUnavailable("the store of kept records is full", retry_after_s=1.0)
        record = KeptRecord(data, next(self._broker.numbers))
        self._broker.kept[key] = (record, monotonic() + ttl_s)
        return record.revision

    async def delete(self, key: str, revision: int) -> None:
        """Forgets a revision."""
        found = await self.get(key)
        if found is not None and found.revision == revision:
            del self._broker.kept[key]


class MemoryQueue:
    """`shoal.queue.interface.Queue` on a `MemoryBroker`."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._ears: list[tuple[str, OnBytes]] = []
        self._open = True
        self.inbox = f"inbox.{uuid.uuid4().hex}"
        self.payloads: Payloads = MemoryPayloads(broker)
        self.dead: DeadLetters = MemoryDeadLetters(broker)
        self.kept: Kept = MemoryKept(broker)

    @property
    def connected(self) -> bool:
        """Whether the queue is open."""
        return self._open

    async def ensure_lines(self, models: Iterable[str]) -> None:
        """Lines are made when they are first used."""

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

    async def stop_pulling(self) -> None:
        """Withdraws this process's pulls."""
        for line in self._broker.lines.values():
            for number, pull in list(line.pulls.items()):
                if pull.owner is self:
                    pull.guard.cancel()
                    del line.pulls[number]

    async def close(self) -> None:
        """Leaves."""
        await self.stop_pulling()
        for subject, ear in self._ears:
            self._broker.ears[subject].remove(ear)
        self._ears.clear()
        self._open = False
