"""What the other workers of the pool hold, and the claims by which workers share out loads.

Owns the heartbeats of others and one lease per (model, slot): whoever loads a model that others
could load, too, holds one, so that a burst for a cold model loads it where it is needed and not
everywhere. A lease ends by itself with a worker that dies. Does not own who wants to load what
(`residency`), and never says where an item goes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from shoal.clock import monotonic
from shoal.errors import QueueUnavailable
from shoal.queue.interface import Kept
from shoal.queue.topology import token
from shoal.wire.envelope import ModelState, Status, UnreadableMessage, decode_status

log = logging.getLogger(__name__)

SILENT_S = 5.0
LEASE_S = 15.0
MAX_PEERS = 10_000


class Peers:
    """The live workers beside this one, as they last described themselves.

    `on_new` is called when a worker is heard of first: it waits to be told who is here.
    """

    def __init__(self, own: str, clock: Callable[[], float] = monotonic) -> None:
        self.on_new: Callable[[], None] = lambda: None
        self._own = own
        self._clock = clock
        self._heard: dict[str, tuple[float, dict[str, ModelState]]] = {}

    def on_status(self, data: bytes) -> None:
        """Takes a heartbeat in; one that drains has nothing any more."""
        try:
            status: Status = decode_status(data)
        except UnreadableMessage as error:
            log.debug("status: %s", error)
            return
        if status.worker == self._own:
            return
        known = self._heard.pop(status.worker, None)
        if status.draining:
            return
        if len(self._heard) >= MAX_PEERS:
            self._heard.pop(next(iter(self._heard)))
        self._heard[status.worker] = (self._clock(), {m.model: m for m in status.models})
        if known is None:
            self.on_new()

    def _live(self) -> list[dict[str, ModelState]]:
        now_s = self._clock()
        while self._heard and next(iter(self._heard.values()))[0] < now_s - SILENT_S:
            del self._heard[next(iter(self._heard))]
        return [models for _, models in self._heard.values()]

    @property
    def alone(self) -> bool:
        """Whether no other worker is alive."""
        return not self._live()

    def copies(self) -> dict[str, int]:
        """How many copies of each model other workers hold or load."""
        counts: dict[str, int] = {}
        for models in self._live():
            for model, state in models.items():
                if state.state in ("resident", "loading"):
                    counts[model] = counts.get(model, 0) + max(1, len(state.devices))
        return counts

    def growing(self) -> dict[str, int]:
        """How many texts of each generator grow at other workers."""
        counts: dict[str, int] = {}
        for models in self._live():
            for model, state in models.items():
                if state.growing:
                    counts[model] = counts.get(model, 0) + state.growing
        return counts

    def can_serve(self, model: str) -> bool:
        """Whether another worker has not said that it cannot."""
        states = [models.get(model) for models in self._live()]
        return any(state is not None and state.state != "unavailable" for state in states)

    def can_adapt(self, model: str, adapter: str) -> bool:
        """Whether another worker runs a model with adapters, and has not said that it lacks one."""
        states = (models.get(model) for models in self._live())
        return any(
            state.adapts and state.state != "unavailable" and adapter not in state.faulty
            for state in states
            if state is not None
        )

    def known(self, model: str) -> ModelState | None:
        """What a worker says of a model who has run it; None when none has."""
        states = (models.get(model) for models in self._live())
        return next((state for state in states if state is not None and state.item_s), None)


@dataclass(slots=True)
class Lease:
    """A claim that is held. revision: of its record."""

    key: str
    revision: int


class Leases:
    """Claims on loads, by the name of the worker that holds them."""

    def __init__(self, kept: Kept, own: str) -> None:
        self._kept = kept
        self._own = own.encode()
        self._held: set[str] = set()

    async def claim(self, model: str, slots: int) -> Lease | None:
        """One of `slots` claims on a model, or None while others hold them all.

        Raises `QueueUnavailable`.
        """
        for slot in range(slots):
            key = f"{token(model)}-{slot}"
            revision = await self._kept.claim(key, self._own, LEASE_S)
            if revision is None:
                revision = await self._take_over(key)
            if revision is not None:
                self._held.add(key)
                return Lease(key, revision)
        return None

    async def _take_over(self, key: str) -> int | None:
        """A claim that a worker of this name left behind when it died."""
        record = await self._kept.get(key)
        if record is None or record.data != self._own or key in self._held:
            return None
        return await self._kept.replace(key, self._own, LEASE_S, record.revision)

    async def renew(self, lease: Lease) -> None:
        """Holds it for longer; a lease that was lost meanwhile stays lost."""
        try:
            revision = await self._kept.replace(lease.key, self._own, LEASE_S, lease.revision)
        except QueueUnavailable as error:
            log.debug("a lease could not be renewed: %s", error)
            return
        if revision is not None:
            lease.revision = revision

    async def release(self, lease: Lease) -> None:
        """Lets others claim it."""
        self._held.discard(lease.key)
        try:
            await self._kept.delete(lease.key, lease.revision)
        except QueueUnavailable as error:
            log.debug("a lease ends by itself: %s", error)
