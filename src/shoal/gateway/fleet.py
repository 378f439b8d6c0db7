"""What the workers last said of themselves.

Owns the heartbeats, their age, and what they say together of devices and speeds. They serve people
and early refusals, never dispatch: which worker runs an item is decided by who pulls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import structs

from shoal.catalog.schema import Entry
from shoal.clock import monotonic
from shoal.errors import NoWorker
from shoal.wire.envelope import AdapterState, ModelState, Status, UnreadableMessage, decode_status

log = logging.getLogger(__name__)

SILENT_S = 5.0
REFRESH_S = 0.5
MAX_WORKERS = 10_000
_BEST_FIRST = ("resident", "loading", "cold", "unavailable")


@dataclass(frozen=True, slots=True)
class Rates:
    """What live workers have seen of one model; 0 while none has.

    token_s: device seconds of a useful token. bytes_per_token: of its texts. full_s: the longest
    batch that a device needs to run at nearly its best rate.
    """

    token_s: float = 0.0
    bytes_per_token: float = 0.0
    full_s: float = 0.0


class Fleet:
    """The live workers and the states of models in them. clock: seconds, monotonic.

    `news` is another number whenever `devices` or `rates` may say something else.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._workers: dict[str, tuple[Status, dict[str, ModelState], float]] = {}
        # Looked up for every request and computed from all workers: kept until they have news.
        self._rates: dict[str, Rates] = {}
        self._devices: int | None = None
        self._most_full_s: float | None = None
        self._refreshed_s = 0.0
        self.news = 0

    def on_status(self, data: bytes) -> None:
        """Takes a heartbeat in."""
        try:
            status = decode_status(data)
        except UnreadableMessage as error:
            log.debug("status: %s", error)
            return
        known, now = self._workers.pop(status.worker, None), self._clock()
        if len(self._workers) >= MAX_WORKERS:
            self._workers.pop(next(iter(self._workers)))
        states = {state.model: state for state in status.models}
        self._workers[status.worker] = (status, states, now)
        if known is None or now - self._refreshed_s >= REFRESH_S:
            self._refresh(now)

    def _refresh(self, now: float) -> None:
        self._rates.clear()
        self._devices = self._most_full_s = None
        self._refreshed_s = now
        self.news += 1

    def _forget_silent(self) -> None:
        now = self._clock()
        while self._workers and next(iter(self._workers.values()))[2] < now - SILENT_S:
            del self._workers[next(iter(self._workers))]
            self._refresh(now)

    def _live(self) -> list[dict[str, ModelState]]:
        """The models of each live worker that takes work; silent workers are forgotten."""
        self._forget_silent()
        return [states for status, states, _ in self._workers.values() if not status.draining]

    @property
    def devices(self) -> int:
        """How many devices the live workers have."""
        self._forget_silent()
        if self._devices is None:
            live = (status for status, _, _ in self._workers.values() if not status.draining)
            self._devices = sum(max(1, status.devices) for status in live)
        return self._devices

    def rates(self, model: str) -> Rates:
        """The rates of a model, so that its tokens times `token_s` over all devices is its time.

        Workers are averaged by their devices; speeds add up, so their times average harmonically.
        """
        found = self._rates.get(model)
        if found is None:
            found = self._rates[model] = _average(self._of_model(model))
        return found

    @property
    def most_full_s(self) -> float:
        """The most that `full_s` of any model is."""
        self._forget_silent()
        if self._most_full_s is None:
            live = (states.values() for _, states, _ in self._workers.values())
            self._most_full_s = max((m.full_s for states in live for m in states), default=0.0)
        return self._most_full_s

    def at_once(self, model: str) -> int:
        """How many texts of a model can grow at once in the copies that are loaded."""
        return sum(state.at_once for _, state in self._of_model(model))

    def _of_model(self, model: str) -> list[tuple[int, ModelState]]:
        """The devices and the state of each live worker that can serve the model."""
        self._forget_silent()
        pairs = ((s.devices, m.get(model)) for s, m, _ in self._workers.values() if not s.draining)
        return [(max(1, n), m) for n, m in pairs if m is not None and m.state != "unavailable"]

    @property
    def size(self) -> int:
        """How many workers are alive and take work."""
        return len(self._live())

    def check(self, entry: Entry) -> None:
        """Raises `NoWorker` when workers are alive and all of them say that they cannot serve it.

        With no worker at all an item may wait: one may be on its way. So it may where a worker has
        not spoken of the model yet, since it follows the same catalog.
        """
        reasons: list[str] = []
        for states in self._live():
            state = states.get(entry.key)
            if state is None or state.state != "unavailable":
                return
            reasons.append(state.reason)
        if reasons:
            raise NoWorker(f"no worker can serve `{entry.id}`: {reasons[0]}", param="model")

    def model_states(self) -> dict[str, ModelState]:
        """The best state of each model, by its key, over all live workers.

        It has the adapters that are loaded on any of them.
        """
        best: dict[str, ModelState] = {}
        adapters: dict[str, list[AdapterState]] = {}
        for states in self._live():
            for state in states.values():
                other = best.get(state.model)
                if other is None or _rank(state) < _rank(other):
                    best[state.model] = state
                if state.adapters:
                    adapters.setdefault(state.model, []).extend(state.adapters)
        for model, loaded in adapters.items():
            best[model] = structs.replace(best[model], adapters=loaded)
        return best


def _rank(state: ModelState) -> tuple[int, float]:
    """The least is the best: of two loads the one that ends first."""
    return _BEST_FIRST.index(state.state), state.load_s - state.loading_s


def _average(states: Sequence[tuple[int, ModelState]]) -> Rates:
    timed = [(n, state.token_s) for n, state in states if state.token_s > 0]
    sized = [(n, state.bytes_per_token) for n, state in states if state.bytes_per_token > 0]
    token_s = sum(n for n, _ in timed) / sum(n / each for n, each in timed) if timed else 0.0
    in_all = sum(n * each for n, each in sized)
    full_s = max((state.full_s for _, state in states), default=0.0)
    return Rates(token_s, in_all / sum(n for n, _ in sized) if sized else 0.0, full_s)
