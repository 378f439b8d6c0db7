"""What an answer says of its time: the header `Server-Timing`.

Owns the header's form and how the times of several texts become one. Does not own measuring them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.wire.envelope import Timing
from shoal.wire.generation import Generated


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast texts came. first_token_s: until the first token of all, from the request on.

    token_s: mean time of each further token of a text; 0 where there is none.
    """

    first_token_s: float
    token_s: float = 0.0


def speed_of(texts: Sequence[Generated], first_token_s: float) -> Speed:
    """The speed of texts that are whole."""
    further = sum(max(0, one.tokens - 1) for one in texts)
    spent_s = sum(one.token_s * max(0, one.tokens - 1) for one in texts)
    return Speed(first_token_s, spent_s / further if further else 0.0)


def server_timing(timing: Timing, speed: Speed | None = None) -> bytes:
    """Milliseconds in the queue, loading, and running; of texts to a first and a further token."""
    text = (
        f"queue;dur={timing.queue_s * 1e3:.2f}, load;dur={timing.load_s * 1e3:.2f}, "
        f"run;dur={timing.run_s * 1e3:.2f}"
    )
    if speed is not None:
        text += f", ttft;dur={speed.first_token_s * 1e3:.2f}"
        if speed.token_s > 0:
            text += f", tpot;dur={speed.token_s * 1e3:.2f}"
    return text.encode()
