"""What could not be loaded, why, and for how long that is believed.

Owns the cool-downs by kind of failure, and how many crashes and failed fits a model's load may
have. Does not own loading (`resident`).
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.catalog.schema import Entry
from shoal.clock import monotonic
from shoal.errors import (
    ModelLoading,
    ModelUnavailable,
    OutOfMemory,
    RuntimeCrashed,
    RuntimeUnavailable,
    ShoalError,
    WeightsMissing,
)

LOAD_CRASHES = 3
LOADS_OUT_OF_MEMORY = 3

# The narrower kind first. What a person must mend is looked at rarely; weights may be on their
# way, and memory comes free by itself.
_COOL_DOWNS_S: tuple[tuple[type[ShoalError], float], ...] = (
    (RuntimeUnavailable, 300.0),
    (WeightsMissing, 30.0),
    (OutOfMemory, 15.0),
    (RuntimeCrashed, 30.0),
    (ModelLoading, 60.0),
    (ModelUnavailable, 120.0),
)
_OTHER_COOL_DOWN_S = 30.0


def cool_down_s(error: ShoalError) -> float:
    """How long a failed load is not tried again."""
    return next((s for kind, s in _COOL_DOWNS_S if isinstance(error, kind)), _OTHER_COOL_DOWN_S)


def blames_runtime(error: ShoalError) -> bool:
    """Whether a failed load says that its runtime, or what it reads, is broken here."""
    return isinstance(error, (RuntimeUnavailable, ModelUnavailable, RuntimeCrashed))


class LoadFaults:
    """The failed loads of a worker, by the models' keys.

    `take_over` is asked whether another runtime serves the model instead: then there is no fault.
    """

    def __init__(self) -> None:
        self.take_over: Callable[[Entry, ShoalError], bool] = lambda _entry, _error: False
        self._faults: dict[str, tuple[ShoalError, float]] = {}
        self._crashes: dict[str, int] = {}
        self._unfit: dict[str, int] = {}

    def current(self, key: str) -> ShoalError | None:
        """Why the model may not be tried now; None when it may."""
        error, until_s = self._faults.get(key, (None, 0.0))
        return error if monotonic() < until_s else None

    def on_loaded(self, key: str) -> None:
        """All is well again."""
        for book in (self._faults, self._crashes, self._unfit):
            book.pop(key, None)

    def on_crash(self, entry: Entry, error: RuntimeCrashed) -> ShoalError | None:
        """The process was lost at the load; the fault once that was often enough to blame it.

        It may have been killed for reasons of its own; its backoff is the pause.
        """
        self._crashes[entry.key] = self._crashes.get(entry.key, 0) + 1
        if self._crashes[entry.key] < LOAD_CRASHES:
            return None
        return self.on_fault(entry, error)

    def on_out_of_memory(self, entry: Entry, error: OutOfMemory) -> ShoalError | None:
        """It did not fit; the fault once more room did not help."""
        self._unfit[entry.key] = self._unfit.get(entry.key, 0) + 1
        if self._unfit[entry.key] < LOADS_OUT_OF_MEMORY:
            return None
        return self.on_fault(entry, error)

    def on_fault(
        self, entry: Entry, error: ShoalError, pause_s: float | None = None
    ) -> ShoalError | None:
        """Believes for a while that a model does not load: its fault, and none of its items'.

        None where another runtime takes over. pause_s: how long, where not by the kind of error.
        """
        if blames_runtime(error) and self.take_over(entry, error):
            self.forgive(entry.key)
            return None
        pause_s = cool_down_s(error) if pause_s is None else pause_s
        for book in (self._crashes, self._unfit):
            book.pop(entry.key, None)
        if isinstance(error, (RuntimeCrashed, OutOfMemory)):
            error = ModelUnavailable(f"{entry.key} does not load: {error}")
        elif entry.id not in error.message:
            error = type(error)(f"{entry.key}: {error.message}")
        error.retry_after_s = pause_s
        self._faults[entry.key] = (error, monotonic() + pause_s)
        return error

    def forgive(self, key: str) -> None:
        """Lets the model be tried now: its entry has changed, or a person asks."""
        self.on_loaded(key)
