"""What this worker has pulled and not yet answered.

Owns each item from its delivery to its outcome: replying before acking, giving back, and the
in-progress acks that keep the broker from handing it to someone else meanwhile. Does not own what
happens in between (`intake`, `dispatch`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import structs

from shoal.clock import monotonic, wall
from shoal.core.delivery import judge
from shoal.errors import DeadlineExceeded, QueueUnavailable, ShoalError
from shoal.ipc.messages import ItemDone, RunItem
from shoal.queue.interface import Delivery, Queue
from shoal.wire.envelope import EMPTY, DeadLetter, Envelope, Failure, Outcome, Timing, encode
from shoal.wire.generation import Piece
from shoal.worker.sent import SentOutcomes

log = logging.getLogger(__name__)

# So long after its deadline an item may still be in a batch that runs.
STRANDED_S = 10.0


@dataclass(slots=True)
class HeldItem:
    """One item in hand.

    key: of its model's line. arrived_s, started_s: monotonic seconds of its delivery and of its
    batch's start. queued_s: how long it had waited at the broker. run_item: there once it is
    prepared. failures: inputs that were left out of it, by index.
    """

    delivery: Delivery
    envelope: Envelope
    arrived_s: float
    key: str = ""
    queued_s: float = 0.0
    run_item: RunItem | None = None
    failures: dict[int, ShoalError] = field(default_factory=dict)
    load_s: float = 0.0
    started_s: float = 0.0

    @property
    def submitted_s(self) -> float:
        """When it was submitted, on this machine's clock of `arrived_s`."""
        return self.arrived_s - self.queued_s

    @property
    def waited_s(self) -> float:
        """How long it waited for its start, its model's load not counted."""
        return max(0.0, self.started_s - self.submitted_s - self.load_s)


class Held:
    """All items in hand. Its size is bounded by what the lines pull."""

    def __init__(
        self, queue: Queue, *, worker: str, ack_wait_s: float, max_attempts: int, inline_max: int
    ) -> None:
        self._queue = queue
        self._worker = worker
        self._ack_wait_s = ack_wait_s
        self._max_attempts = max_attempts
        self._inline_max_bytes = inline_max
        self._items: dict[str, HeldItem] = {}
        self._requests: dict[str, set[str]] = {}
        self.sent = SentOutcomes(queue)
        self.empty = asyncio.Event()
        self.empty.set()

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, item_id: str) -> HeldItem:
        return self._items[item_id]

    def __contains__(self, item_id: object) -> bool:
        return item_id in self._items

    def add(self, item: HeldItem) -> bool:
        """Takes an item in hand; False when it is here already (delivered twice)."""
        envelope = item.envelope
        if envelope.item in self._items:
            return False
        self._items[envelope.item] = item
        self._requests.setdefault(envelope.request, set()).add(envelope.item)
        self.empty.clear()
        return True

    def of_request(self, request: str) -> list[str]:
        """The ids of a request's items that are here."""
        return list(self._requests.get(request, ()))

    def run_items(self, item_ids: Iterable[str]) -> list[RunItem]:
        """What a runtime is sent of these items, but of those that have ended."""
        found = (self._items.get(item_id) for item_id in item_ids)
        return [item.run_item for item in found if item is not None and item.run_item is not None]

    def requests(self, item_ids: Iterable[str]) -> set[str]:
        """The requests that these items are of."""
        found = (self._items.get(item_id) for item_id in item_ids)
        return {item.envelope.request for item in found if item is not None}

    def items(self) -> Iterable[HeldItem]:
        """All items that are here."""
        return self._items.values()

    def of_model(self, key: str) -> list[str]:
        """The ids of the items of a model (`id@revision`) that are here."""
        return [i for i, item in self._items.items() if item.key == key]

    def _take(self, item_id: str) -> HeldItem | None:
        item = self._items.pop(item_id, None)
        if item is None:
            return None
        siblings = self._requests[item.envelope.request]
        siblings.discard(item_id)
        if not siblings:
            del self._requests[item.envelope.request]
        if not self._items:
            self.empty.set()
        return item

    async def succeed(self, done: ItemDone, run_s: float) -> None:
        """Sends an item's result, with the failures of those of its inputs that have none."""
        item_id = done.item
        item = self._items.get(item_id)
        if item is None or item.run_item is None:
            return
        outcome = Outcome(
            item_id,
            result=done.result,
            failures=_wire(item.failures) | _counted(done.failures, item.failures),
            tokens=sum(item.run_item.lengths),
            timing=Timing(item.waited_s, item.load_s, run_s),
            worker=self._worker,
        )
        await self._answer(item_id, outcome)

    async def fail_inputs(self, item_id: str) -> None:
        """Answers for an item none of whose inputs could be prepared, each with its own error."""
        item = self._items.get(item_id)
        if item is not None:
            failures = _wire(item.failures)
            await self._answer(item_id, Outcome(item_id, failures=failures, worker=self._worker))

    async def grow(self, item_id: str, piece: Piece, at: int) -> None:
        """Sends what an item's text has grown by, the `at`-th time. Raises `QueueUnavailable`."""
        item = self._items.get(item_id)
        if item is None:
            return
        timing = Timing(item.waited_s, item.load_s, monotonic() - item.started_s)
        outcome = Outcome(item_id, piece=piece, at=at, timing=timing, worker=self._worker)
        await self._queue.reply(item.envelope.reply, encode(outcome))

    async def fail(self, item_id: str, error: ShoalError, *, again: bool = True) -> None:
        """Ends an attempt with an error: another attempt later, or the error as the answer.

        again: False where a part of the answer has been sent, so that there can be no other.
        """
        item = self._items.get(item_id)
        if item is None:
            return
        if not again:
            failure = Failure.of(error)
            await self._answer(item_id, Outcome(item_id, failure=failure, worker=self._worker))
            return
        verdict = judge(error, attempt=item.delivery.attempt, max_attempts=self._max_attempts)
        if verdict.again_in_s is not None:
            self._take(item_id)
            log.info(
                "item %s goes back after attempt %d: %s", item_id, item.delivery.attempt, error
            )
            await item.delivery.nak(verdict.again_in_s)
            return
        outcome = Outcome(item_id, failure=Failure.of(error), worker=self._worker)
        bury = verdict.bury and item.envelope.letter is None  # a replay's letter is kept already
        await self._answer(item_id, outcome, bury=bury)

    async def _answer(self, item_id: str, outcome: Outcome, *, bury: bool = False) -> None:
        """Replies, then acks. Without a broker nothing is acked: the item comes back."""
        item = self._items[item_id]
        try:
            if bury and outcome.failure is not None:
                await self._try_to_bury(item, outcome.failure)
            data = encode(outcome)
            if len(data) > self._inline_max_bytes:
                ref = await self._queue.payloads.put(bytes(outcome.result))
                data = encode(structs.replace(outcome, result=EMPTY, payload=ref))
            await self._queue.reply(item.envelope.reply, data)
            self.sent.add(item_id, data)
        except QueueUnavailable as error:
            log.warning("item %s could not be answered: %s", item_id, error)
            if self._queue.connected and outcome.failure is None and item_id in self._items:
                # It is the result that has no room: to run again would not mend that.
                failure = Failure.of(error)
                await self._answer(item_id, Outcome(item_id, failure=failure, worker=self._worker))
                return
            self._take(item_id)
            return
        if self._take(item_id) is not None:
            await item.delivery.ack()

    async def _try_to_bury(self, item: HeldItem, cause: Failure) -> None:
        """Buries where there is room; its caller is answered in any case.

        Raises `QueueUnavailable` where the broker is away: the item will come back.
        """
        try:
            await self.bury(item.delivery, cause, item.envelope)
        except QueueUnavailable as error:
            if not self._queue.connected:
                raise
            log.error("item %s is not kept: %s", item.envelope.item, error)  # noqa: TRY400

    async def bury(
        self, delivery: Delivery, cause: Failure, envelope: Envelope | None = None
    ) -> None:
        """Keeps an item whole as a dead letter. Raises `QueueUnavailable`."""
        body, model, item_id = b"", "", ""
        if envelope is not None:
            model, item_id = envelope.model, envelope.item
            if envelope.payload is not None:
                try:
                    body = await self._queue.payloads.get(envelope.payload)
                except QueueUnavailable as error:
                    log.warning("the body of item %s could not be kept: %s", item_id, error)
        log.error("item %s of %s is buried: %s", item_id, model or "no model", cause.message)
        letter = DeadLetter(
            delivery.data,
            cause,
            delivery.attempt,
            self._worker,
            wall(),
            model,
            item_id,
            body,
        )
        try:
            await self._queue.dead.bury(letter)
        except QueueUnavailable:
            if not body or not self._queue.connected:
                raise
            log.warning("the body of item %s is too large to be kept", item_id)
            await self._queue.dead.bury(structs.replace(letter, body=b""))

    def has(self, item: HeldItem) -> bool:
        """Whether this very delivery is in hand."""
        return self._items.get(item.envelope.item) is item

    def forget(self, item_id: str) -> None:
        """Lets go of an item that nobody waits for any more; the caller acks it."""
        self._take(item_id)

    async def give_back(self, item_ids: Iterable[str], rest_s: float = 0.0) -> None:
        """Gives items back to the queue, for another worker; what never ran has lost no attempt.

        rest_s: nobody gets them before.
        """
        for item_id in item_ids:
            item = self._take(item_id)
            if item is not None:
                await item.delivery.nak(rest_s, untouched=item.started_s == 0.0)

    async def give_back_all(self) -> None:
        """Gives everything back to the queue (at the end of a drain)."""
        await self.give_back(list(self._items))

    async def keep_alive(self) -> None:
        """Extends what has been here for a while, for ever; no device can hold this task up.

        What is here long after its deadline was stranded by a bug: it ends.
        """
        while True:
            await asyncio.sleep(self._ack_wait_s / 3)
            old_s, late_s = monotonic() - self._ack_wait_s / 3, wall() - STRANDED_S
            for name, item in list(self._items.items()):
                if item.envelope.deadline_s < late_s:
                    log.error("item %s was not ended by its deadline", name)
                    await self.fail(name, DeadlineExceeded("it was not done by its deadline"))
                elif item.arrived_s < old_s:
                    await item.delivery.in_progress()


def _wire(failures: dict[int, ShoalError]) -> dict[int, Failure]:
    return {index: Failure.of(error) for index, error in failures.items()}


def _counted(failed: dict[int, Failure], left_out: Iterable[int]) -> dict[int, Failure]:
    """Failures of inputs that ran, counted with those that were left out before."""
    counted: dict[int, Failure] = {}
    for at, failure in failed.items():
        own = at
        for missing in sorted(left_out):
            own += missing <= own
        counted[own] = structs.replace(failure, input_index=own)
    return counted
