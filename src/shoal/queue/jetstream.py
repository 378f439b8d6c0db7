"""The queue on NATS JetStream.

Owns the hot path: one-shot pulls and publishes (`publishes`). Each is one core NATS message through
`link`, where the library's JetStream wrapper would make several round trips and tasks. Facts this
relies on, all of them of the server's protocol:

- a publish's reply subject is taken by its ack, so the inbox for outcomes travels in the envelope;
- a pulled message arrives with its own subject, and only the end marker of a pull has the pull's;
  so there is at most one open pull per line, found by the line's subject;
- a pull that fills up sends no end marker: deliveries are counted.

Does not own what becomes of a delivery (`deliveries`), names and settings (`topology`), the
connection (`connection`) or framing (`link`).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from shoal.clock import monotonic
from shoal.core.types import Lane
from shoal.errors import QueueUnavailable
from shoal.queue.connection import Address, OnState, check_connected, connect
from shoal.queue.counts import line_counts
from shoal.queue.deadletters import NatsDeadLetters
from shoal.queue.deliveries import JetStreamDelivery
from shoal.queue.interface import (
    Control,
    DeadLetters,
    Kept,
    OnBytes,
    OnDelivery,
    OnRefused,
    Payloads,
    Shelf,
)
from shoal.queue.kept import NatsKept
from shoal.queue.link import Link, OnMessage
from shoal.queue.payloads import NatsPayloads
from shoal.queue.publishes import NO_RESPONDERS, Publishes
from shoal.queue.shelf import NatsShelf
from shoal.queue.topology import Topology, token
from shoal.queue.untouched import Untouched

log = logging.getLogger(__name__)

_LEAVE_S = 2.0  # a broker that stands still holds nobody up for longer
_PULL_GRACE_S = 1.0
_AGAIN_S = 0.5
_UNTIMELY = (NO_RESPONDERS, b"NATS/1.0 409")  # the next pull, made at once, would fare the same


@dataclass(slots=True)
class _Pull:
    number: int
    left: int
    on_delivery: OnDelivery
    on_end: Callable[[], None]
    guard: asyncio.TimerHandle | None = None


class JetStreamQueue:
    """`shoal.queue.interface.Queue` on JetStream. Open it with `JetStreamQueue.open`."""

    def __init__(self, link: Link, topology: Topology) -> None:
        self._link = link
        self._topology = topology
        self._js = link.jetstream()
        self._id = uuid.uuid4().hex[:16]
        self.inbox = f"shoal.reply.{topology.pool}.{self._id}"
        self.payloads: Payloads = NatsPayloads(
            self._js, topology.payloads_config(), "large requests and results"
        )
        self.answers: Payloads = NatsPayloads(
            self._js, topology.answers_config(), "large kept answers"
        )
        self.dead: DeadLetters = NatsDeadLetters(self._js, topology)
        self.kept: Kept = NatsKept(link, topology.kept_config())
        self.leases: Kept = NatsKept(link, topology.leases_config())
        self._untouched = Untouched(link, topology.untouched_config())
        self._shelf = NatsShelf(link, topology.catalog_config())
        self.catalog: Shelf = self._shelf
        self._made: set[bytes] = set()
        self._pulls: dict[bytes, _Pull] = {}
        self._pull_inboxes: dict[bytes, Subscription] = {}
        self._pull_number = 0
        self._publishes = Publishes(
            link,
            b"_INBOX.%b.ack." % self._id.encode(),
            timeout_s=topology.limits.publish_timeout_s,
        )
        self._sweeper: asyncio.Task[None] | None = None
        self._restoring: asyncio.Task[None] | None = None
        self._when_back: list[OnState] = []

    @classmethod
    async def open(
        cls, address: Address, topology: Topology, *, name: str, wait_s: float = 10.0
    ) -> JetStreamQueue:
        """Connects, makes the topology and the inboxes. Raises `QueueUnavailable`."""
        queue: JetStreamQueue | None = None

        async def on_reconnected() -> None:
            if queue is not None:
                queue._on_reconnected()

        link = await connect(address, name=name, on_reconnected=on_reconnected, wait_s=wait_s)
        queue = cls(link, topology)
        try:
            await queue._untouched.listen()
            await queue._ensure()
            await queue._subscribe(f"_INBOX.{queue._id}.ack.*", queue._publishes.on_ack)
        except (NatsError, TimeoutError) as error:
            await link.close()
            raise QueueUnavailable(f"JetStream at {address.url}: {error}") from error
        queue._sweeper = asyncio.create_task(queue._publishes.sweep(), name="queue publish sweeper")
        return queue

    async def _ensure(self) -> None:
        self._topology = await self._topology.ensure_stream(self._js)
        await self.payloads.ensure()
        await self.answers.ensure()
        await self.dead.ensure()
        await self.kept.ensure()
        await self.leases.ensure()
        await self._untouched.ensure()
        await self.catalog.ensure()

    @property
    def connected(self) -> bool:
        """Whether the broker can be reached now."""
        return bool(self._link.is_connected)

    async def _make_line(self, line: bytes, model: str, lane: Lane) -> None:
        """Makes the consumer of a line that is pulled from: of a model that rests there is none."""
        if line in self._made:
            return
        try:
            await self._topology.ensure_line(self._js, model, lane)
        except (NatsError, TimeoutError) as error:
            raise QueueUnavailable(f"cannot make the queue's line: {error}") from error
        self._made.add(line)

    async def remove_lines(self, models: Iterable[str]) -> list[str]:
        """Removes the consumers of lines that hold nothing."""
        held = {model for model, _ in await self.counts()}
        idle = [model for model in models if model not in held]
        try:
            for model in idle:
                for lane in self._topology.lanes:
                    self._made.discard(self._topology.line(model, lane).encode())
                    await self._topology.remove_line(self._js, model, lane)
        except (NatsError, TimeoutError) as error:
            raise QueueUnavailable(f"cannot remove the queue's lines: {error}") from error
        # What came in between the count and the removal has its line back when it is pulled.
        late = {model for model, _ in await self.counts()}
        return [model for model in idle if model not in late]

    async def counts(self) -> dict[tuple[str, Lane], int]:
        """Items of each line, from one request."""
        return await line_counts(self._link, self._topology)

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
        """Publishes; the ack is handled when it comes."""
        self._publishes.send(
            self._topology.line(model, lane).encode(),
            data,
            item_id=item_id,
            ttl_s=ttl_s,
            on_refused=on_refused,
        )

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
        """One one-shot pull; a line has at most one open.

        None is kept for a broker that is away: when it is back, each would bring items.
        """
        check_connected(self._link)
        line = self._topology.line(model, lane).encode()
        if line in self._pulls:
            raise ValueError(f"{model} ({lane}) has an open pull")
        self._pull_number += 1
        pull = _Pull(self._pull_number, max_items, on_delivery, on_end)
        self._pulls[line] = pull
        inbox = f"_INBOX.{self._id}.{token(model)}.{lane}"
        try:
            await self._make_line(line, model, lane)
        except QueueUnavailable:
            self._drop_pull(line)
            raise
        if self._pulls.get(line) is not pull:  # withdrawn meanwhile
            return
        if line not in self._pull_inboxes:  # one for each line, so that a line can be withdrawn
            self._pull_inboxes[line] = await self._link.listen(f"{inbox}.*", self._on_pulled)
        pull.guard = asyncio.get_running_loop().call_later(
            expires_s + _PULL_GRACE_S, self._end_pull, line, pull.number
        )
        try:
            self._link.send(
                f"$JS.API.CONSUMER.MSG.NEXT.{self._topology.stream}"
                f".{self._topology.consumer(model, lane)}".encode(),
                b'{"batch":%d,"expires":%d}' % (max_items, int(expires_s * 1e9)),
                f"{inbox}.{pull.number}".encode(),
            )
        except NatsError as error:
            self._drop_pull(line)
            raise QueueUnavailable(f"cannot pull: {error}") from error

    def _on_end_marker(self, number: int, headers: bytes) -> None:
        """404, 408: nothing came in time. 409 or, without a stream, 503: the pull was refused."""
        for line, pull in self._pulls.items():
            if pull.number == number:
                if headers.startswith(_UNTIMELY):
                    self._made.discard(line)  # it may have been removed, here or elsewhere
                    loop = asyncio.get_running_loop()
                    loop.call_later(_AGAIN_S, self._end_pull, line, number)
                else:
                    self._end_pull(line, number)
                return

    def _on_pulled(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        if not reply:
            self._on_end_marker(int(subject.rpartition(b".")[2]), headers)
            return
        delivery = JetStreamDelivery(self._link, self._untouched, reply, data)
        pulled = self._pulls.get(subject)
        if pulled is None:  # the pull was withdrawn while this was on its way
            delivery.give_back()
            return
        pulled.left -= 1
        pulled.on_delivery(delivery)
        if pulled.left == 0:
            self._end_pull(subject, pulled.number)

    def _drop_pull(self, line: bytes) -> _Pull | None:
        pull = self._pulls.pop(line, None)
        if pull is not None and pull.guard is not None:
            pull.guard.cancel()
        return pull

    def _end_pull(self, line: bytes, number: int) -> None:
        pull = self._pulls.get(line)
        if pull is not None and pull.number == number:
            self._drop_pull(line)
            pull.on_end()

    def _on_reconnected(self) -> None:
        if self._restoring is not None:
            self._restoring.cancel()
        self._restoring = asyncio.create_task(self._restore(), name="queue restore")

    async def _restore(self) -> None:
        """After a reconnection: the topology again (a memory stream is gone), publishes, pulls."""
        while True:
            try:
                self._made.clear()
                await self._ensure()
                break
            except (NatsError, TimeoutError, QueueUnavailable) as error:
                log.warning("the queue is back but not ready: %s", error)
            await asyncio.sleep(_AGAIN_S)
        self._shelf.on_back()
        self._publishes.again(monotonic())
        for line, pull in list(self._pulls.items()):
            self._end_pull(line, pull.number)
        for on_back in self._when_back:
            await on_back()

    def when_back(self, on_back: OnState) -> None:
        """Calls `on_back` after every reconnection."""
        self._when_back.append(on_back)

    async def listen(self, on_outcome: OnBytes) -> None:
        """Opens the inbox for outcomes."""
        await self._subscribe(self.inbox, _bytes_to(on_outcome))

    async def hear(self, control: Control, on_message: OnBytes) -> None:
        """Listens to a kind of control message."""
        await self._subscribe(self._topology.control(control), _bytes_to(on_message))

    async def _subscribe(self, subject: str, on_message: OnMessage) -> Subscription:
        subscription = await self._link.listen(subject, on_message)
        await self._link.flush()
        return subscription

    async def reply(self, inbox: str, data: bytes) -> None:
        """Sends an outcome."""
        self._send(inbox, data)

    async def tell(self, control: Control, data: bytes) -> None:
        """Sends a control message."""
        self._send(self._topology.control(control), data)

    def _send(self, subject: str, data: bytes) -> None:
        try:
            self._link.send(subject.encode(), data)
        except NatsError as error:
            raise QueueUnavailable(f"the queue did not take a message: {error}") from error

    async def withdraw(self, model: str, lane: Lane) -> None:
        """Ends a line's pull here and, with the interest in its inbox, at the broker."""
        line = self._topology.line(model, lane).encode()
        inbox = self._pull_inboxes.pop(line, None)
        pull = self._pulls.get(line)
        if pull is not None:
            self._end_pull(line, pull.number)
        if inbox is not None and self._link.is_connected:
            try:
                await self._link.silence(inbox)
            except NatsError as error:
                log.debug("withdrawing a pull: %r", error)

    async def stop_pulling(self) -> None:
        """Ends every pull here and at the broker; what still arrives is given back."""
        for line in list(self._pulls):
            self._drop_pull(line)
        inboxes, self._pull_inboxes = list(self._pull_inboxes.values()), {}
        if inboxes and self._link.is_connected:
            try:
                async with asyncio.timeout(_LEAVE_S):
                    await asyncio.gather(*(inbox.drain() for inbox in inboxes))
            except (NatsError, TimeoutError) as error:
                log.debug("withdrawing pulls: %r", error)

    async def close(self) -> None:
        """Flushes and disconnects."""
        for task in (self._sweeper, self._restoring):
            if task is not None:
                task.cancel()
        await self._shelf.close()
        await self.stop_pulling()
        try:
            if self._link.is_connected:
                await self._link.flush(timeout=_LEAVE_S)
            await self._link.close()
        except (NatsError, TimeoutError) as error:
            log.debug("closing the queue connection: %r", error)


def _bytes_to(on_bytes: OnBytes) -> OnMessage:
    def handle(_subject: bytes, _reply: bytes, _headers: bytes, data: bytes) -> None:
        on_bytes(data)

    return handle
