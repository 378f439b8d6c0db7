"""What a route hands to the submit path, and what it gets back.

Owns the seam between the HTTP shapes (openai, rerank, native) and the queue (submit). Does not own
parsing or splitting.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from shoal.catalog.schema import Entry
from shoal.core.types import Lane, Task
from shoal.errors import ShoalError
from shoal.wire.envelope import Failure, Inputs, ModelState, Params, Result, Timing
from shoal.wire.generation import Generated, Piece


class Job(msgspec.Struct, frozen=True):
    """One task on one model: the inputs of an HTTP request, checked and not yet split.

    deadline_s is wall-clock seconds since the epoch. tenant: who shares the model fairly with the
    other tenants; None is a tenant too. refused: inputs of the request that were found wrong
    already, by their index in it; `inputs` has the others, in order. adapter: the key of the
    adapter that the model is to be run with.
    """

    request_id: str
    task: Task
    entry: Entry
    inputs: Inputs
    params: Params
    lane: Lane
    deadline_s: float
    traceparent: str | None = None
    tenant: str | None = None
    refused: dict[int, Failure] = {}
    adapter: str | None = None

    @property
    def model(self) -> str:
        """What the answer calls the model: its id, with the adapter's name where it has one."""
        return self.entry.id if self.adapter is None else self.adapter.rpartition("@")[0]


@dataclass(frozen=True, slots=True)
class Answer:
    """The joined result of all items of a job, in the order of the inputs.

    tokens: what the models read, special tokens included. timing: the slowest item's. failures:
    inputs that failed alone, by their index; the result has a row for each of the others.
    """

    result: Result
    tokens: int
    timing: Timing
    failures: dict[int, Failure] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class End:
    """The end of one text of a stream."""

    generated: Generated
    timing: Timing


@dataclass(frozen=True, slots=True)
class Grew:
    """What one text of a stream has grown by. timing: of its item so far."""

    piece: Piece
    timing: Timing


# What has become of a text, behind the index of its input.
Grown = tuple[int, Grew | End]


class Submits(Protocol):
    """Runs jobs through the queue."""

    async def run(self, job: Job) -> Answer:
        """The answer to a job. Raises a `ShoalError`: the first failure of any of its items.

        With `Params.partial` failures are in the answer, unless every input has failed.

        Cancelling the call withdraws the job's items that have not run.
        """

    def stream(self, job: Job) -> AsyncGenerator[Grown, None]:
        """The texts of a job as they grow, each index's pieces in order and then its `End`.

        The pieces of a text joined are its whole text. Raises as `run` does, also after pieces.
        Closing it withdraws what has not ended.
        """

    def ready(self) -> str | None:
        """None when jobs can be taken, else why not (for /readyz)."""

    def model_states(self) -> Mapping[str, ModelState]:
        """What the fleet last said of each model, by its key."""


def in_request(job: Job, answer: Answer) -> Answer:
    """The answer with its failures counted over the whole request, refused inputs among them."""
    if not job.refused:
        return answer
    places = _places(job)
    failures = dict(job.refused)
    for at, failure in answer.failures.items():
        error = failure.error()
        place_in_request(job, error)
        failures[places[at]] = Failure.of(error)
    return replace(answer, failures=failures)


def place_in_request(job: Job, error: ShoalError) -> None:
    """Counts the input that an error names over the whole request."""
    if job.refused and error.input_index is not None:
        before = f"inputs[{error.input_index}]"
        error.input_index = _places(job)[error.input_index]
        if error.param == before:
            error.param = f"inputs[{error.input_index}]"


def n_inputs(inputs: Inputs) -> int:
    """How many there are, whatever they are."""
    return len(inputs.texts) or len(inputs.ids) or len(inputs.blobs) or len(inputs.chats)


def _places(job: Job) -> list[int]:
    """Where each input that was sent stands in its request."""
    n = n_inputs(job.inputs)
    return [at for at in range(n + len(job.refused)) if at not in job.refused]
