"""A job becomes items in the queue, and their outcomes one answer.

Owns splitting, publishing, waiting up to the deadline, keeping the first outcome of each item,
joining them in order, and withdrawing what nobody waits for. Does not own HTTP, which worker does
the work, or whether there is time for it (`backlog`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from shoal.clock import wall
from shoal.core.gather import Gather
from shoal.core.split import spans
from shoal.errors import (
    Bug,
    DeadlineExceeded,
    ModelLoading,
    QueueFull,
    QueueUnavailable,
    ShoalError,
)
from shoal.gateway.backlog import BacklogBook
from shoal.gateway.fleet import Fleet
from shoal.gateway.jobs import Answer, Job
from shoal.queue.interface import Queue
from shoal.settings import GatewaySettings
from shoal.wire.envelope import (
    EMPTY,
    Cancel,
    Envelope,
    Failure,
    Inputs,
    ModelState,
    Outcome,
    PayloadRef,
    Result,
    Timing,
    UnreadableMessage,
    decode_outcome,
    decode_result,
    encode,
)
from shoal.wire.media import cost_tokens

log = logging.getLogger(__name__)

_SPECIAL_TOKENS = 2
_MAX_FETCHES = 1024
# How long a model may still load, where no worker has ever loaded it.
_LOAD_GUESS_S = 5.0


@dataclass(slots=True)
class _Part:
    """An item's end.

    result: None where no input of it has one. failures: by the input's index in the request.
    """

    result: Result | None
    failures: dict[int, Failure]
    tokens: int = 0
    timing: Timing = field(default_factory=Timing)


@dataclass(slots=True)
class _Waiting:
    """A job under way.

    spans: the first input of each item and the one behind its last. costs_tokens: of each item, 0
    once it is done.
    """

    job: Job
    spans: list[tuple[int, int]]
    costs_tokens: list[int]
    gather: Gather[_Part]
    done: asyncio.Future[None]
    payloads: list[PayloadRef] = field(default_factory=list)


class Submitter:
    """`shoal.gateway.jobs.Submits` through the queue."""

    def __init__(
        self, queue: Queue, fleet: Fleet, backlog: BacklogBook, settings: GatewaySettings
    ) -> None:
        self._queue = queue
        self._fleet = fleet
        self._backlog = backlog
        self._settings = settings
        self._id = uuid.uuid4().hex[:12]
        self._numbers = itertools.count(1)
        self._waiting: dict[str, tuple[_Waiting, int]] = {}
        self._fetches: set[asyncio.Task[None]] = set()

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
        if not self._queue.connected:  # before anything is put into a store that is away, too
            raise QueueUnavailable("the queue cannot be reached", retry_after_s=1.0)
        self._fleet.check(job.entry)
        model, lane = job.entry.key, job.lane
        seen = self._fleet.rates(model).bytes_per_token
        costs_tokens, shared_tokens = _costs(job, seen or job.entry.profile.bytes_per_token)
        cuts = spans(
            costs_tokens,
            shared_tokens=shared_tokens,
            max_tokens=min(self._settings.item_tokens, self._backlog.quantum_tokens(model)),
            max_inputs=1 if job.inputs.blobs else self._settings.item_inputs,
        )
        costs = [sum(costs_tokens[a:b]) + shared_tokens * (b - a) for a, b in cuts]
        tokens = sum(costs)
        if len(self._waiting) + len(cuts) > self._settings.max_in_flight_items:
            after_s = self._backlog.retry_s(model, lane, tokens)
            raise QueueFull("this gateway waits for as much as it may", retry_after_s=after_s)
        self._backlog.admit(job.entry, lane, tokens, job.deadline_s - wall())
        self._backlog.add(lane, model, tokens)
        request = f"{self._id}-{next(self._numbers)}"
        loop = asyncio.get_running_loop()
        waiting = _Waiting(job, cuts, costs, Gather(len(cuts)), loop.create_future())
        names = [f"{request}.{index}" for index in range(len(cuts))]
        for index, name in enumerate(names):
            self._waiting[name] = (waiting, index)
        timer = loop.call_later(max(0.0, job.deadline_s - wall()), self._on_deadline, waiting)
        try:
            for index in range(len(cuts)):
                await self._submit(waiting, request, index)
                if waiting.done.done():
                    break  # refused already: the rest need not be sent
            await waiting.done
            return _join(waiting.gather.parts())
        finally:
            timer.cancel()
            if not waiting.done.cancel() and not waiting.done.cancelled():
                waiting.done.exception()  # another error may have come first
            self._backlog.add(lane, model, -sum(waiting.costs_tokens))
            for name in names:
                self._waiting.pop(name, None)
            if not waiting.gather.complete:
                await self._withdraw(request)
            for ref in waiting.payloads:
                self._spawn(self._queue.payloads.delete(ref))

    async def _submit(self, waiting: _Waiting, request: str, index: int) -> None:
        job, now_s = waiting.job, wall()
        start, end = waiting.spans[index]
        whole = len(waiting.spans) == 1
        body = encode(job.inputs if whole else _slice(job.inputs, start, end))
        payload = None
        if len(body) > self._settings.inline_max_bytes:
            try:
                async with asyncio.timeout(max(0.0, job.deadline_s - now_s)):
                    payload = await self._queue.payloads.put(body)
            except TimeoutError as error:
                raise DeadlineExceeded("no answer within the deadline") from error
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

    def _refused(self, waiting: _Waiting, error: ShoalError) -> None:
        """The queue did not take an item."""
        if isinstance(error, QueueFull):
            job, tokens = waiting.job, sum(waiting.costs_tokens)
            error.retry_after_s = self._backlog.retry_s(job.entry.key, job.lane, tokens)
        _fail(waiting, error)

    def _settle(self, waiting: _Waiting, index: int) -> None:
        """An item is done: its cost waits no more."""
        tokens, waiting.costs_tokens[index] = waiting.costs_tokens[index], 0
        self._backlog.add(waiting.job.lane, waiting.job.entry.key, -tokens)

    def _on_deadline(self, waiting: _Waiting) -> None:
        """At the deadline, and not when a running batch happens to end."""
        state = self.model_states().get(waiting.job.entry.key)
        if state is not None and state.state in ("cold", "loading"):
            left_s = (state.load_s or _LOAD_GUESS_S) - state.loading_s
            _fail(waiting, ModelLoading("the model is being loaded", retry_after_s=left_s))
        else:
            _fail(waiting, DeadlineExceeded("no answer within the deadline"))

    def on_outcome(self, data: bytes) -> None:
        """Takes an outcome in; the first of each item counts."""
        try:
            outcome = decode_outcome(data)
        except UnreadableMessage as error:
            log.error("an outcome cannot be read: %s", error)  # noqa: TRY400
            return
        found = self._waiting.pop(outcome.item, None)
        if found is None:
            return  # answered already, or nobody waits any more
        waiting, index = found
        self._settle(waiting, index)
        if outcome.failure is not None:
            self._fail_item(waiting, index, outcome.failure)
        elif outcome.payload is not None:
            if len(self._fetches) >= _MAX_FETCHES:
                _fail(waiting, QueueFull("too many large results at once", retry_after_s=1.0))
                return
            self._spawn(self._fetch(waiting, index, outcome, outcome.payload))
        else:
            _keep(waiting, index, outcome, bytes(outcome.result))

    def _fail_item(self, waiting: _Waiting, index: int, failure: Failure) -> None:
        """An item has failed whole: so have its inputs, or the request."""
        start, end = waiting.spans[index]
        if waiting.job.params.partial:
            _add(
                waiting, index, _Part(None, {at: _placed(failure, at) for at in range(start, end)})
            )
        elif failure.input_index is not None:
            _fail(waiting, _placed(failure, start + failure.input_index).error())
        else:
            _fail(waiting, failure.error())

    async def _fetch(
        self, waiting: _Waiting, index: int, outcome: Outcome, ref: PayloadRef
    ) -> None:
        try:
            data = await self._queue.payloads.get(ref)
        except QueueUnavailable as error:
            _fail(waiting, error)
            return
        _keep(waiting, index, outcome, data)
        await self._queue.payloads.delete(ref)

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work, name="payload")  # type: ignore[arg-type]
        self._fetches.add(task)
        task.add_done_callback(self._fetches.discard)

    async def _withdraw(self, request: str) -> None:
        """Tells the workers that nobody waits for this request."""
        try:
            await self._queue.tell("cancel", encode(Cancel(request)))
        except QueueUnavailable as error:
            log.debug("cancel: %s", error)


def _fail(waiting: _Waiting, error: ShoalError) -> None:
    if not waiting.done.done():
        waiting.done.set_exception(error)


def _keep(waiting: _Waiting, index: int, outcome: Outcome, data: bytes) -> None:
    start, end = waiting.spans[index]
    failures = {start + at: _placed(f, start + at) for at, f in outcome.failures.items()}
    if not all(start <= at < end for at in failures):
        _fail(waiting, Bug(f"failures of inputs {sorted(outcome.failures)} of {end - start}"))
        return
    try:
        result = decode_result(data) if len(failures) < end - start else None
    except (UnreadableMessage, ValueError) as error:
        _fail(waiting, Bug(f"a result cannot be read: {error}"))
        return
    _add(waiting, index, _Part(result, failures, outcome.tokens, outcome.timing))


def _add(waiting: _Waiting, index: int, part: _Part) -> None:
    if waiting.gather.add(index, part) and waiting.gather.complete and not waiting.done.done():
        waiting.done.set_result(None)


def _placed(failure: Failure, index: int) -> Failure:
    """The failure as that of the `index`-th input of its request."""
    whole = failure.input_index is None and failure.param is not None
    param = failure.param if whole else f"inputs[{index}]"
    return msgspec.structs.replace(failure, input_index=index, param=param)


def _costs(job: Job, per_token: float) -> tuple[list[int], int]:
    """Estimated tokens of each input, and what each costs besides (a query, special tokens).

    per_token: bytes of text per token.
    """
    inputs = job.inputs
    if inputs.ids:
        return [len(ids) for ids in inputs.ids], 0
    if inputs.blobs:
        return [cost_tokens(blob, job.entry.inputs) for blob in inputs.blobs], 0
    costs = [int(_size_bytes(text) / per_token) + _SPECIAL_TOKENS for text in inputs.texts]
    if inputs.firsts:
        firsts = [int(_size_bytes(text) / per_token) for text in inputs.firsts]
        costs = [a + b for a, b in zip(costs, firsts, strict=True)]
    joint = inputs.query is not None and job.entry.scorer == "joint"
    shared = int(_size_bytes(inputs.query or "") / per_token) if joint else 0
    return costs, shared


def _size_bytes(text: str) -> int:
    """Bytes of UTF-8, without making them where the text is plain."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _slice(inputs: Inputs, start: int, end: int) -> Inputs:
    """The inputs from `start` to `end`, with what all of them share."""
    return Inputs(
        inputs.texts[start:end],
        inputs.ids[start:end],
        inputs.query,
        inputs.firsts[start:end],
        inputs.blobs[start:end],
    )


def _join(parts: Sequence[_Part]) -> Answer:
    """One answer from the parts of a request, in order. Raises the first error if there is none."""
    failures = {at: failure for part in parts for at, failure in part.failures.items()}
    results = [part.result for part in parts if part.result is not None]
    if not results:
        raise failures[min(failures)].error()
    if len(parts) == 1:
        return Answer(results[0], parts[0].tokens, parts[0].timing, failures)
    slowest = max((part.timing for part in parts), key=lambda t: t.queue_s + t.run_s)
    tokens = sum(part.tokens for part in parts)
    return Answer(Result.join(results), tokens, slowest, failures)
