"""What a chaos run will do, all of it decided by its seed: the faults, and each request.

Nothing happens here; `tests.chaos.run` does it. The moments are seconds from the start of the load.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.support.ledger import Ask

CALM_S = 2.0  # before the first fault
QUIET_S = 6.0  # after the last one has begun
MODELS = {
    "echo": "{}",
    "wide": "{dim: 256}",
    "slow": "{sleep_s: 0.2}",
    "sleepy": "{sleep_s: 1.0}",
    "frail": "{poison: 'the poison', crash: 'the crash', oom: 'the oom', nan: 'not a number'}",
}
DIMS = {"wide": 256}
# How often each fault comes, by what it strikes; `hold_s` follows for those that last.
WEIGHTS = {
    ("runtime", "kill"): 4,
    ("runtime", "stop"): 2,
    ("worker", "kill"): 3,
    ("worker", "term"): 2,
    ("worker", "stop"): 2,
    ("gateway", "kill"): 2,
    ("gateway", "term"): 2,
    ("gateway", "stop"): 1,
    ("broker", "kill"): 2,
    ("broker", "term"): 1,
    ("broker", "stop"): 1,
}
BAD = {"the poison": "run_failed", "not a number": "run_failed", "the oom": "out_of_memory"}
CRASH = "the crash"


@dataclass(frozen=True, slots=True)
class Fault:
    """One blow. hold_s: how long the target is stopped, or stays away before its restart."""

    at_s: float
    part: str
    blow: str
    target: int
    hold_s: float

    def __str__(self) -> str:
        return f"{self.at_s:7.2f} s  {self.blow} {self.part} {self.target} for {self.hold_s:.2f} s"


def schedule(seed: str, length_s: float) -> list[Fault]:
    """The faults of a run, in the order of their moments; two each of gateways and workers."""
    rng = random.Random(f"{seed} faults")
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    found: list[Fault] = []
    at_s = CALM_S
    while at_s < length_s - QUIET_S:
        part, blow = rng.choices(kinds, weights)[0]
        target = 0 if part == "broker" else rng.randrange(2)
        # A worker that sleeps for longer than ack_wait sees its items run elsewhere meanwhile.
        found.append(Fault(at_s, part, blow, target, rng.uniform(0.1, 2.5)))
        at_s += rng.uniform(0.5, 3.5)
    return found


def draw(seed: str, n: int) -> Ask:
    """Request number n."""
    rng = random.Random(f"{seed} request {n}")
    name = f"{seed}-{n}"
    model = rng.choices(["echo", "wide", "slow", "sleepy", "frail"], [50, 12, 12, 2, 24])[0]
    size = rng.choices(["small", "many", "long"], [90, 6, 4])[0]
    if size == "many" and model in ("echo", "frail", "wide"):
        texts = [f"{name} text {i}" for i in range(rng.randrange(65, 300))]
    elif size == "long":  # over the inline limit
        texts = [f"{name} {i} " + "long " * 1200 for i in range(rng.randrange(4, 12))]
    else:
        texts = [f"{name} text {i}" for i in range(rng.randrange(1, 5))]
    expects = None
    if model == "frail" and rng.random() < 0.12:
        bad = rng.choices([*BAD, CRASH], [8, 8, 2, 1])[0]
        texts[rng.randrange(len(texts))] = bad
        expects = BAD.get(bad, "runtime_crashed")
    manner = rng.choices(["plain", "leaves", "dawdles", "breaks off"], [92, 4, 2, 2])[0]
    deadline_s = rng.choices([rng.uniform(0.2, 1.0), rng.uniform(4, 8), 16.0], [6, 80, 14])[0]
    lane = "bulk" if rng.random() < 0.25 else "interactive"
    dim = DIMS.get(model, 8)
    return Ask(name, model, texts, deadline_s, lane, expects, dim, manner)
