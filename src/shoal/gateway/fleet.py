"""What the workers last said of themselves.

Owns the heartbeats and their age. They serve people and early refusals, never dispatch: which
worker runs an item is decided by who pulls it.
"""

from __future__ import annotations

import logging

from shoal.catalog.schema import Entry
from shoal.clock import monotonic
from shoal.errors import NoWorker
from shoal.wire.envelope import ModelState, Status, UnreadableMessage, decode_status

log = logging.getLogger(__name__)

SILENT_S = 5.0
MAX_WORKERS = 10_000
_BEST_FIRST = ("resident", "loading", "cold", "unavailable")


class Fleet:
    """The live workers and the states of models in them."""

    def __init__(self) -> None:
        self._workers: dict[str, tuple[Status, dict[str, ModelState], float]] = {}

    def on_status(self, data: bytes) -> None:
        """Takes a heartbeat in."""
        try:
            status = decode_status(data)
        except UnreadableMessage as error:
            log.debug("status: %s", error)
            return
        self._workers.pop(status.worker, None)
        if len(self._workers) >= MAX_WORKERS:
            self._workers.pop(next(iter(self._workers)))
        states = {state.model: state for state in status.models}
        self._workers[status.worker] = (status, states, monotonic())

    def _live(self) -> list[dict[str, ModelState]]:
        """The models of each live worker that takes work; silent workers are forgotten."""
        late_s = monotonic() - SILENT_S
        while self._workers and next(iter(self._workers.values()))[2] < late_s:
            del self._workers[next(iter(self._workers))]
        return [states for status, states, _ in self._workers.values() if not status.draining]

    @property
    def size(self) -> int:
        """How many workers are alive and take work."""
        return len(self._live())

    def check(self, entry: Entry) -> None:
        """Raises `NoWorker` when workers are alive and none can serve the model.

        With no worker at all an item may wait: one may be on its way.
        """
        reasons: list[str] = []
        for _, states, _ in self._workers.values():
            state = states.get(entry.id)
            if state is not None and state.state != "unavailable":
                return
            if state is not None and state.reason:
                reasons.append(state.reason)
        if self._live():
            why = reasons[0] if reasons else "no live worker has it in its catalog"
            raise NoWorker(f"no worker can serve `{entry.id}`: {why}", param="model")

    def model_states(self) -> dict[str, str]:
        """The best state of each model over all live workers."""
        best: dict[str, str] = {}
        for states in self._live():
            for state in states.values():
                ranks = (_BEST_FIRST.index(s) for s in (state.state, best.get(state.model)) if s)
                best[state.model] = _BEST_FIRST[min(ranks)]
        return best
