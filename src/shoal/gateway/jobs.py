"""What a route hands to the submit path, and what it gets back.

Owns the seam between the HTTP shapes (openai, rerank, native) and the queue (submit). Does not own
parsing or splitting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from shoal.catalog.schema import Entry
from shoal.core.types import Lane, Task
from shoal.wire.envelope import Inputs, Params, Result, Timing


class Job(msgspec.Struct, frozen=True):
    """One task on one model: all inputs of an HTTP request, checked and not yet split.

    deadline_s is wall-clock seconds since the epoch. tenant: who shares the model fairly with the
    other tenants; None is a tenant too.
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


@dataclass(frozen=True, slots=True)
class Answer:
    """The joined result of all items of a job, in the order of the inputs.

    tokens: what the models read, special tokens included. timing: the slowest item's.
    """

    result: Result
    tokens: int
    timing: Timing


class Submits(Protocol):
    """Runs jobs through the queue."""

    async def run(self, job: Job) -> Answer:
        """The answer to a job. Raises a `ShoalError`: the first failure of any of its items.

        Cancelling the call withdraws the job's items that have not run.
        """

    def ready(self) -> str | None:
        """None when jobs can be taken, else why not (for /readyz)."""

    def model_states(self) -> dict[str, str]:
        """What the fleet last said of each model id: cold, loading, resident or unavailable."""
