"""What happens to a delivered item once its attempt has ended: one pure function.

| the attempt ended with                             | reply | then                     |
|----------------------------------------------------|-------|--------------------------|
| a result                                           | yes   | ack                      |
| the caller's fault, a lack of capacity, our bug    | yes   | ack                      |
| a fault of the runtime that another try may mend   | no    | nak, with growing delays |
| the same at the last attempt                       | yes   | ack                      |
| a fault of the runtime that no other try can mend  | yes   | ack                      |

A reply always goes out before the ack, so a worker that dies in between causes a second answer,
which the gateway drops, and never none. Does not own sending either.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import RuntimeFault, ShoalError

FIRST_DELAY_S = 0.2
MOST_DELAY_S = 5.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reply`: tell the client now. `again_in_s`: give the item back for another attempt."""

    reply: bool
    again_in_s: float | None = None


DONE = Verdict(reply=True)


def judge(error: ShoalError | None, *, attempt: int, max_attempts: int) -> Verdict:
    """The verdict on attempt number `attempt` (the first is 1) that ended with `error` or well."""
    if not isinstance(error, RuntimeFault) or not error.retryable or attempt >= max_attempts:
        return DONE
    delay_s = min(MOST_DELAY_S, FIRST_DELAY_S * 2 ** (attempt - 1))
    return Verdict(reply=False, again_in_s=delay_s)
