"""A job becomes items in the queue, and their outcomes one answer, or a stream of texts.

Owns splitting, publishing, waiting up to the deadline, taking in what comes back, and withdrawing
what nobody waits for. Does not own HTTP, which worker does the work, whether there is time for it
(`backlog`), how outcomes become an answer (`waiting`) or texts grow (`growth`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncGenerator
from functools import partial

import msgspec

from shoal.clock import wall
from shoal.core.gather import Gather
from shoal.core.split import spans
from shoal.errors import (
    Bug,
    ModelLoading,
    QueueFull,
    QueueUnavailable,
    ShoalError,
)
from shoal.gateway.backlog import BacklogBook
from shoal.gateway.costs import TextLengths, costs
from shoal.gateway.fleet import Fleet
from shoal.gateway.growth import Growth
from shoal.gateway.jobs import Answer, End, Grown, Job
from shoal.gateway.pacing import Pacing
from shoal.gateway.waiting import Waiting, fail, fail_item, join, keep, too_late
from shoal.queue.interface import Queue
from shoal.settings import GatewaySettings
from shoal.wire.envelope import (
    EMPTY,
    Cancel,
    Envelope,
    Inputs,
    ModelState,
    Outcome,
    PayloadRef,
    UnreadableMessage,
    decode_outcome,
    encode,
)
from shoal.wire.generation import Piece, unpack

log = logging.getLogger(__name__)

_MAX_FETCHES = 1024
# How long a model may still load, where no worker has ever loaded it.
_LOAD_GUESS_S = 5.0


class Submitter:
    """`shoal.gateway.jobs.Submits` through the queue."""

    def __init__(
        self, queue: Queue, fleet: Fleet, backlog: BacklogBook, settings: GatewaySettings
    ) -> None:
        self._queue = queue
        self._fleet = fleet
        self._backlog = backlog
        self._settings = settings
        self._lengths = TextLengths()
        self._pacing = Pacing(backlog.window)
        self._id = uuid.uuid4().hex[:12]
        self._numbers = itertools.count(1)
        self._waiting: dict[str, tuple[Waiting, int]] = {}
        self._fetches: set[asyncio.Task[None]] = set()
        self._fetching: set[str] = set()

    @property
    def in_flight(self) -> int:
        """Items that this gateway waits for."""
        return len(self._waiting)

    def waiting_items(self) -> list[str]:
        """The ids of those items."""
        return list(self._waiting)

    def ready(self) -> str | None:
        """None when jobs can be taken, else why not."""
        if not self._queue.connected:
            return "the queue cannot be reached"
        return None if self._fleet.size else "no worker is alive"

    def model_states(self) -> dict[str, ModelState]:
        """The best state of each model in the fleet, by its key."""
        return self._fleet.model_states()

    async def run(self, job: Job) -> Answer:
        """The answer to a job; see `Submits`."""
        waiting = self._begin(job)
        try:
            await self._submit_all(waiting)
            await waiting.done
            answer = join(waiting.gather.parts())
            if job.task == "generate":
                for record in answer.result.records:
                    self._lengths.learn(job.entry.key, unpack(record))
            return answer
        finally:
            self._end(waiting)
            await self._withdraw(waiting)

    async def stream(self, job: Job) -> AsyncGenerator[Grown, None]:
        """The texts of a job as they grow; see `Submits`."""
        waiting = self._begin(job)
        waiting.growth = growth = Growth(len(waiting.spans))
        waiting.done.add_done_callback(partial(self._on_stream_end, waiting, growth))
        # Beside the reading: the first texts may be whole before there is room for the last.
        submitting = asyncio.create_task(self._submit_beside(waiting), name="submit")
        try:
            ended = False
            while not ended:
                if not waiting.done.done():
                    await growth.changed.wait()
                ended = waiting.done.done()
                for index, grown in growth.take():
                    if isinstance(grown, End):
                        self._lengths.learn(job.entry.key, grown.generated)
                    yield index, grown
            waiting.done.result()
        finally:
            submitting.cancel()
            self._end(waiting)
            await self._withdraw(waiting)

    def _on_stream_end(self, waiting: Waiting, growth: Growth, _: asyncio.Future[None]) -> None:
        """A stream has ended or failed: its texts end now, however slow its reader is."""
        growth.changed.set()
        self._end(waiting)
        if not waiting.gather.complete:
            self._spawn(self._withdraw(waiting))

    def _begin(self, job: Job) -> Waiting:
        """Splits a job that may be taken, and waits for the outcomes of its items."""
        if not self._queue.connected:  # before anything is put into a store that is away, too
            raise QueueUnavailable("the queue cannot be reached", retry_after_s=1.0)
        self._fleet.check(job.entry)
        model, lane = job.entry.key, job.lane
        seen = self._fleet.rates(model).bytes_per_token
        costs_tokens, shared_tokens = costs(
            *(job, seen or job.entry.profile.bytes_per_token, self._lengths.usual_tokens(model))
        )
        alone = job.inputs.blobs or job.task == "generate"
        cuts = spans(
            costs_tokens,
            shared_tokens=shared_tokens,
            max_tokens=min(self._settings.item_tokens, self._backlog.item_tokens(model)),
            max_inputs=1 if alone else self._settings.item_inputs,
        )
        of_items = [sum(costs_tokens[a:b]) + shared_tokens * (b - a) for a, b in cuts]
        tokens = sum(of_items)
        if len(self._waiting) + len(cuts) > self._settings.max_in_flight_items:
            after_s = self._backlog.retry_s(model, lane, tokens)
            raise QueueFull("this gateway waits for as much as it may", retry_after_s=after_s)
        left_s = job.deadline_s - wall()
        self._backlog.admit(job.entry, lane, of_items, left_s)
        self._backlog.add(lane, model, tokens, len(cuts))
        request = f"{self._id}-{next(self._numbers)}"
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        timer = loop.call_later(max(0.0, left_s), self._on_deadline, done, job, left_s)
        waiting = Waiting(job, request, cuts, of_items, Gather(len(cuts)), done, left_s, timer)
        for index in range(len(cuts)):
            self._waiting[f"{request}.{index}"] = (waiting, index)
        return waiting

    def _end(self, waiting: Waiting) -> None:
        """Nobody waits for the job any more; said again, it does what has come since."""
        waiting.timer.cancel()
        if not waiting.done.cancel() and not waiting.done.cancelled():
            waiting.done.exception()  # another error may have come first
        for index in list(waiting.entered):
            self._leave_line(waiting, index)
        job, left = waiting.job, [tokens for tokens in waiting.costs_tokens if tokens]
        waiting.costs_tokens = [0] * len(waiting.spans)
        self._backlog.add(job.lane, job.entry.key, -sum(left), -len(left))
        if not waiting.gather.complete:
            for index in range(len(waiting.spans)):
                self._waiting.pop(f"{waiting.request}.{index}", None)
        while waiting.payloads:
            self._spawn(self._queue.payloads.delete(waiting.payloads.pop()))

    async def _submit_beside(self, waiting: Waiting) -> None:
        try:
            await self._submit_all(waiting)
        except ShoalError as error:
            fail(waiting, error)
        except Exception as error:  # task root
            log.exception("submitting a stream")
            fail(waiting, Bug(f"{type(error).__name__}: {error}"))

    async def _submit_all(self, waiting: Waiting) -> None:
        line, tenant = waiting.line, waiting.job.tenant
        for index in range(len(waiting.spans)):
            size, over = waiting.size(index), waiting.done
            if not await self._pacing.enter(line, tenant, size, over, first=index == 0):
                return  # refused already, or too late: the rest need not be sent
            waiting.entered.add(index)
            await self._submit(waiting, index)
            if waiting.done.done():
                return

    async def _submit(self, waiting: Waiting, index: int) -> None:
        job, request, now_s = waiting.job, waiting.request, wall()
        start, end = waiting.spans[index]
        whole = len(waiting.spans) == 1
        body = encode(job.inputs if whole else _slice(job.inputs, start, end))
        payload = None
        if len(body) > self._settings.inline_max_bytes:
            try:
                async with asyncio.timeout(max(0.0, job.deadline_s - now_s)):
                    payload = await self._queue.payloads.put(body)
            except TimeoutError as error:
                raise too_late(waiting.time_s) from error
            waiting.payloads.append(payload)
        envelope = Envelope(
            item=f"{request}.{index}",
            request=request,
            index=index,
            of=len(waiting.spans),
            task=job.task,
            model=job.entry.id,
            revision=job.entry.revision,
            lane=job.lane,
            cost_tokens=waiting.costs_tokens[index],
            n_inputs=end - start,
            deadline_s=job.deadline_s,
            submitted_s=now_s,
            reply=self._queue.inbox,
            params=job.params,
            body=EMPTY if payload else msgspec.Raw(body),
            payload=payload,
            adapter=job.adapter,
            tenant=job.tenant,
            traceparent=job.traceparent,
        )
        await self._queue.submit(
            job.entry.key,
            job.lane,
            encode(envelope),
            item_id=envelope.item,
            ttl_s=job.deadline_s - now_s,
            on_refused=partial(self._refused, waiting),
        )

    def _refused(self, waiting: Waiting, error: ShoalError) -> None:
        """The queue did not take an item."""
        if isinstance(error, QueueFull):
            job, tokens = waiting.job, sum(waiting.costs_tokens)
            error.retry_after_s = self._backlog.retry_s(job.entry.key, job.lane, tokens)
        fail(waiting, error)

    def _settle(self, waiting: Waiting, index: int) -> None:
        """An item is done: its cost waits no more."""
        self._leave_line(waiting, index)
        tokens, waiting.costs_tokens[index] = waiting.costs_tokens[index], 0
        self._backlog.add(waiting.job.lane, waiting.job.entry.key, -tokens, -1)

    def _leave_line(self, waiting: Waiting, index: int) -> None:
        if index in waiting.entered:
            waiting.entered.discard(index)
            self._pacing.leave(waiting.line, waiting.job.tenant, waiting.size(index))

    def _on_deadline(self, done: asyncio.Future[None], job: Job, time_s: float) -> None:
        """At the deadline, and not when a running batch happens to end."""
        if done.done():
            return
        state = self.model_states().get(job.entry.key)
        if state is not None and state.state in ("cold", "loading"):
            left_s = (state.load_s or _LOAD_GUESS_S) - state.loading_s
            done.set_exception(ModelLoading("the model is being loaded", retry_after_s=left_s))
        else:
            done.set_exception(too_late(time_s))

    def on_outcome(self, data: bytes) -> None:
        """Takes an outcome in; the first of each item counts."""
        try:
            outcome = decode_outcome(data)
        except UnreadableMessage as error:
            log.error("an outcome cannot be read: %s", error)  # noqa: TRY400
            return
        if outcome.piece is not None:
            self._on_piece(outcome, outcome.piece)
            return
        found = self._waiting.pop(outcome.item, None)
        if found is None:  # answered already, or nobody waits any more
            self._drop_unclaimed(outcome.payload)
            return
        waiting, index = found
        self._settle(waiting, index)
        if outcome.failure is not None:
            fail_item(waiting, index, outcome.failure)
        elif outcome.payload is not None:
            if len(self._fetches) >= _MAX_FETCHES:
                fail(waiting, QueueFull("too many large results at once", retry_after_s=1.0))
                return
            self._fetching.add(outcome.payload.key)
            self._spawn(self._fetch(waiting, index, outcome, outcome.payload))
        else:
            keep(waiting, index, outcome, bytes(outcome.result))

    def _drop_unclaimed(self, ref: PayloadRef | None) -> None:
        """Makes room of a large result that nobody waits for; not of one that is being fetched."""
        if ref is not None and ref.key not in self._fetching and len(self._fetches) < _MAX_FETCHES:
            self._spawn(self._queue.payloads.delete(ref))

    def _on_piece(self, outcome: Outcome, piece: Piece) -> None:
        """A text has grown: its item goes on."""
        found = self._waiting.get(outcome.item)
        if found is None or found[0].growth is None:
            return
        waiting, index = found
        try:
            found[0].growth.piece(index, outcome, piece)
        except ShoalError as error:
            fail(waiting, error)

    async def _fetch(self, waiting: Waiting, index: int, outcome: Outcome, ref: PayloadRef) -> None:
        try:
            data = await self._queue.payloads.get(ref)
            keep(waiting, index, outcome, data)
            await self._queue.payloads.delete(ref)
        except QueueUnavailable as error:
            fail(waiting, error)
        finally:
            self._fetching.discard(ref.key)

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work, name="payload")  # type: ignore[arg-type]
        self._fetches.add(task)
        task.add_done_callback(self._fetches.discard)

    async def _withdraw(self, waiting: Waiting) -> None:
        """Tells the workers, once, that nobody waits for what has not come of this request."""
        if waiting.gather.complete or waiting.withdrawn:
            return
        waiting.withdrawn = True
        try:
            await self._queue.tell("cancel", encode(Cancel(waiting.request)))
        except QueueUnavailable as error:
            log.debug("cancel: %s", error)


def _slice(inputs: Inputs, start: int, end: int) -> Inputs:
    """The inputs from `start` to `end`, with what all of them share."""
    return Inputs(
        inputs.texts[start:end],
        inputs.ids[start:end],
        inputs.query,
        inputs.firsts[start:end],
        inputs.blobs[start:end],
        inputs.chats[start:end],
    )
