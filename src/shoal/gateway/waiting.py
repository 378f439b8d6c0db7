"""A job under way: the ends of its items, and the one answer that they become.

Owns what a job waits with, where an item's failures stand in the request, joining, and that the
first fault ends a job. Does not own the queue or the time (`submit`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from shoal.core.gather import Gather
from shoal.core.types import Lane
from shoal.errors import Bug, CallerError, DeadlineExceeded, ShoalError
from shoal.gateway.growth import Growth
from shoal.gateway.jobs import Answer, Job
from shoal.wire.envelope import (
    Failure,
    Outcome,
    PayloadRef,
    Result,
    Timing,
    UnreadableMessage,
    decode_result,
)


@dataclass(slots=True)
class Part:
    """An item's end.

    result: None where no input of it has one. failures: by the input's index in the request.
    """

    result: Result | None
    failures: dict[int, Failure]
    tokens: int = 0
    timing: Timing = field(default_factory=Timing)


@dataclass(slots=True)
class Waiting:
    """A job under way.

    request: its name among all gateways'. spans: the first input of each item and the one behind
    its last. costs_tokens: of each item, 0 once it is done. entered: the items that lie in the line
    or run. time_s: from its beginning to its
    deadline. growth: of its texts, where it streams. withdrawn: the workers were told that nobody
    waits for it.
    """

    job: Job
    request: str
    spans: list[tuple[int, int]]
    costs_tokens: list[int]
    gather: Gather[Part]
    done: asyncio.Future[None]
    time_s: float
    timer: asyncio.TimerHandle
    growth: Growth | None = None
    payloads: list[PayloadRef] = field(default_factory=list)
    entered: set[int] = field(default_factory=set)
    withdrawn: bool = False

    @property
    def line(self) -> tuple[Lane, str]:
        """The line that its items go into."""
        return self.job.lane, self.job.entry.key

    def size(self, index: int) -> float:
        """How much of its line's window an item takes, until it is done: tokens, or texts."""
        return 1.0 if self.job.task == "generate" else float(self.costs_tokens[index])


def fail(waiting: Waiting, error: ShoalError) -> None:
    """Ends a job that has not ended."""
    if not waiting.done.done():
        waiting.done.set_exception(error)


def too_late(time_s: float, what: str = "no answer within the deadline") -> DeadlineExceeded:
    """The error of a job that had so much time, with what to do about it."""
    return DeadlineExceeded(
        f"{what} ({time_s:.2f} s; the header `X-Shoal-Deadline-Ms` asks for another)"
    )


def fail_item(waiting: Waiting, index: int, failure: Failure) -> None:
    """Takes in that an item has failed whole: so have its inputs, or the request."""
    start, end = waiting.spans[index]
    error = failure.error()
    if waiting.job.params.partial:
        add(waiting, index, Part(None, {at: placed(failure, at) for at in range(start, end)}))
    elif failure.input_index is not None:
        fail(waiting, placed(failure, start + failure.input_index).error())
    elif waiting.job.task == "generate" and isinstance(error, CallerError):
        fail(waiting, placed(failure, start).error())  # such an item has one input
    elif isinstance(error, DeadlineExceeded):
        fail(waiting, too_late(waiting.time_s, error.message))
    else:
        fail(waiting, error)


def keep(waiting: Waiting, index: int, outcome: Outcome, data: bytes) -> None:
    """Takes in what an item has come to; data: MessagePack of its `Result`."""
    start, end = waiting.spans[index]
    failures = {start + at: placed(f, start + at) for at, f in outcome.failures.items()}
    if not all(start <= at < end for at in failures):
        fail(waiting, Bug(f"failures of inputs {sorted(outcome.failures)} of {end - start}"))
        return
    try:
        result = decode_result(data) if len(failures) < end - start else None
    except (UnreadableMessage, ValueError) as error:
        fail(waiting, Bug(f"a result cannot be read: {error}"))
        return
    add(waiting, index, Part(result, failures, outcome.tokens, outcome.timing))


def add(waiting: Waiting, index: int, part: Part) -> None:
    """Takes in the end of an item, the first of each."""
    if not waiting.gather.add(index, part):
        return
    if waiting.growth is not None:
        try:
            waiting.growth.end(index, part.result, part.timing)
        except ShoalError as error:
            fail(waiting, error)
    if waiting.gather.complete and not waiting.done.done():
        waiting.done.set_result(None)


def placed(failure: Failure, index: int) -> Failure:
    """The failure as that of the `index`-th input of its request."""
    whole = failure.input_index is None and failure.param is not None
    param = failure.param if whole else f"inputs[{index}]"
    return msgspec.structs.replace(failure, input_index=index, param=param)


def join(parts: Sequence[Part]) -> Answer:
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
