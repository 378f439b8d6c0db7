"""Which models a worker keeps loaded, on which device.

A planner is told what is (copies, memories, demand) and returns what to do; a shell does it and
tells what became of it. Time is an argument; the worker and the simulator drive the same objects.

Owns the nouns. Does not own the choice (`residency_plan`), what a model in memory is worth
(`residency_rank`), measuring, loading, or the agreement among workers (a lease for every load of a
model that others have too).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Copy:
    """A loaded model. size_bytes: measured. since_s: when it was loaded. used_s: its last batch.

    busy: a batch of it runs or has been formed; it must not be evicted.
    """

    model: str
    device: str
    size_bytes: int
    since_s: float
    used_s: float
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Demand:
    """What is known of one model that this worker may hold; resident or not.

    size_bytes: of a copy, measured, else estimated (`measured` says which). load_s: what a load
    takes. waiting: items in its lines, the worker's own window included. waited_s: the item-seconds
    that they have waited so far while the model was not here, or its device ran others' batches
    beside an idle one. queued: how many of those that wait do not run yet. backlog_s: device
    seconds of what waits. slack_s: until the most urgent of them must be loaded for; None while
    unknown. pinned: is never evicted, and is loaded without demand. min_copies: that the pool
    should have.
    elsewhere: copies that other workers have or load. idle_timeout_s: None for never.
    blocked: it may not be loaded now (it failed a moment ago, or another worker has the lease).
    """

    model: str
    size_bytes: int
    load_s: float
    measured: bool = False
    waiting: int = 0
    waited_s: float = 0.0
    queued: int = 0
    backlog_s: float = 0.0
    slack_s: float | None = None
    pinned: bool = False
    min_copies: int = 0
    elsewhere: int = 0
    idle_timeout_s: float | None = None
    blocked: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """One memory and the devices on it: the host's for all CPU devices, or a GPU's own.

    used_bytes: what the runtime processes hold of it, measured, loads under way included.
    """

    name: str
    budget_bytes: int
    used_bytes: int
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """What a worker holds at one moment. loading: (model, device) of loads under way.

    idle_devices: those with nothing to run.
    """

    memories: tuple[Memory, ...]
    copies: tuple[Copy, ...]
    demands: tuple[Demand, ...]
    loading: tuple[tuple[str, str], ...] = ()
    idle_devices: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Load:
    """Load a model on a device. why: for people."""

    model: str
    device: str
    why: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Unload a model from a device. why: for people."""

    model: str
    device: str
    why: str


@dataclass(frozen=True, slots=True)
class Close:
    """Form no more batches of a model on a device, so that it becomes idle and can be evicted.

    Holds until the next plan, which says so again if it still wants that. Without it, a model that
    always has work would never be idle, and one that waits for its room would wait for ever.
    """

    model: str
    device: str
    why: str


Action = Load | Evict | Close


class ResidencyPolicy(Protocol):
    """Chooses what is loaded. The evictions that a load needs come before it in the list."""

    def on_requests(self, model: str, n: int, now: float) -> None:
        """N items of a model have arrived."""

    def plan(self, held: Held, now: float) -> list[Action]:
        """What to do now."""

    def next_look_s(self, held: Held, now: float) -> float | None:
        """The moment, on the clock of `now`, when `plan` may say something else by itself.

        None: not before something happens.
        """


def kept(held: Held) -> frozenset[str]:
    """Models of which no copy may go now: pinned ones, and those with no more than `min_copies`."""
    here = Counter(copy.model for copy in held.copies)
    return frozenset(
        demand.model
        for demand in held.demands
        if demand.pinned or 0 < here[demand.model] <= demand.min_copies - demand.elsewhere
    )


def fits(held: Held, model: str) -> bool:
    """Whether a model can be loaded here at all, if all goes that may go.

    A model that does not fit is in no plan; the shell says so to those who wait for it.
    """
    size_bytes = next(d.size_bytes for d in held.demands if d.model == model)
    stay = kept(held) - {model}
    return any(
        size_bytes + sum(c.size_bytes for c in held.copies if lies_in(c, memory, stay))
        <= memory.budget_bytes
        for memory in held.memories
    )


def lies_in(copy: Copy, memory: Memory, models: frozenset[str]) -> bool:
    """Whether a copy is one of certain models, in a certain memory."""
    return copy.model in models and copy.device in memory.devices
