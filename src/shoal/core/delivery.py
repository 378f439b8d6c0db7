"""What happens to a delivered item once its attempt has ended: one pure function.

| The attempt ended with | Attempt | Reply | Then |
|---|---|---|---|
| a result | any | yes | ack |
| the caller's fault (`CallerError`) | any | yes | ack |
| a lack of capacity (`CapacityError`: deadline, loading) | any | yes | ack |
| a crash of the runtime, out of memory | not the last| no | nak, with growing delay |
| a crash of the runtime, out of memory | the last | yes | bury, ack |
| a run that failed when the item ran alone, or a bug | any | yes | bury, ack |
| a model or runtime that cannot be had | any | yes | ack |
| nothing: nobody waits, or its deadline has passed | any | no | ack |
| nothing: it was given back before it ran | any | no | comes back at once, as the same attempt |
| nothing: the worker vanished | any | no | comes back by itself |
| bytes that are no envelope of ours | any | no | bury, ack |

A reply always goes out before the ack, so a worker that dies in between causes a second answer,
which the gateway drops, and never none. An item is buried (kept whole, with the cause, as a dead
letter) when it may itself be the culprit; what is wrong with a model is not an item's fault.
Does not own sending any of these.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import Bug, OutOfMemory, RunFailed, RuntimeCrashed, RuntimeFault, ShoalError

FIRST_DELAY_S = 0.2
MOST_DELAY_S = 5.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reply`: tell the client now. `again_in_s`: give the item back for another attempt.

    `bury`: keep it as a dead letter before it is acked.
    """

    reply: bool
    again_in_s: float | None = None
    bury: bool = False


def judge(error: ShoalError | None, *, attempt: int, max_attempts: int) -> Verdict:
    """The verdict on attempt number `attempt` (the first is 1) that ended with `error` or well."""
    if isinstance(error, RuntimeFault) and error.retryable and attempt < max_attempts:
        delay_s = min(MOST_DELAY_S, FIRST_DELAY_S * 2 ** (attempt - 1))
        return Verdict(reply=False, again_in_s=delay_s)
    suspect = isinstance(error, (RuntimeCrashed, OutOfMemory, RunFailed, Bug))
    return Verdict(reply=True, bury=suspect)
