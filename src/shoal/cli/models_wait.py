"""`shoal models load|evict`, and waiting for what they ask for.

Owns the nudge, hearing until the workers' states show what was wanted, and saying how it goes. Does
not own whether a model may come or go (each worker's `residency`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from shoal.catalog.schema import Entry
from shoal.cli.models_cluster import Hearing, named, phase, read_shelf
from shoal.cli.reach import Reach, opened
from shoal.clock import monotonic
from shoal.core.spelling import did_you_mean
from shoal.errors import SettingsError
from shoal.queue.interface import Queue
from shoal.wire.envelope import ModelState, Nudge, encode

# A worker speaks every second: what was said before a nudge has been said again.
SETTLED_S = 1.5
KNOWN_S = 10.0
EVICT_AGAIN_S = 1.0
LOAD_AGAIN_S = 30.0
_HERE = ("resident", "loading")


@dataclass(frozen=True, slots=True)
class Asked:
    """Which models, and how long a person waits; 0: not at all. worker: the one that is meant."""

    names: Sequence[str]
    worker: str | None
    timeout_s: float


def load_models(reach: Reach, asked: Asked) -> int:
    """Has models loaded; the exit code."""

    async def work() -> bool:
        async with opened(reach) as queue:
            entries = await _entries(reach, queue, asked.names)
            hearing = Hearing()
            await hearing.start(queue)
            return await see_loaded(queue, hearing, entries, asked)

    return 0 if asyncio.run(work()) else 1


def evict_models(reach: Reach, asked: Asked) -> int:
    """Has models evicted where they are idle; the exit code."""

    async def work() -> bool:
        async with opened(reach) as queue:
            entries = await _entries(reach, queue, asked.names)
            hearing = Hearing()
            await hearing.start(queue)
            return all([await _Wait(queue, hearing, entry, asked).evict() for entry in entries])

    return 0 if asyncio.run(work()) else 1


async def see_loaded(
    queue: Queue, hearing: Hearing, entries: Sequence[Entry], asked: Asked
) -> bool:
    """Asks for models and waits until a worker has each; False where one does not come."""
    loads = (_Wait(queue, hearing, entry, asked).load() for entry in entries)
    return all(await asyncio.gather(*loads))


async def _entries(reach: Reach, queue: Queue, names: Sequence[str]) -> list[Entry]:
    pool = reach.settings().pool
    catalog = (await read_shelf(queue)).snapshot
    found = [named(catalog, name) for name in names]
    for entry in found:
        if entry.pool != pool:
            raise SettingsError(f"`{entry.id}` is served by pool `{entry.pool}`: --pool names it")
    return found


class _Wait:
    """One model, while somebody waits for it to come or go."""

    def __init__(self, queue: Queue, hearing: Hearing, entry: Entry, asked: Asked) -> None:
        self._queue = queue
        self._hearing = hearing
        self._entry = entry
        self._asked = asked
        self._said = ""

    async def load(self) -> bool:
        """Whether it is loaded."""
        if not await self._known():
            return False
        if holders := self._where("resident"):
            self._say(f"resident on {holders}")
            return True
        give_up_s = monotonic() + self._asked.timeout_s
        while True:
            await self._nudge("load")
            nudged_s = monotonic()
            if not self._asked.timeout_s:
                self._say("asked for")
                return True
            left_s = min(LOAD_AGAIN_S, give_up_s - nudged_s)
            await self._hearing.until(partial(self._has_come, nudged_s), left_s)
            if holders := self._where("resident"):
                self._say(f"resident on {holders}")
                return True
            states = self._states()
            if not states or all(state.state == "unavailable" for state in states.values()):
                reasons = dict.fromkeys(state.reason for state in states.values())
                self._say("; ".join(["unavailable", *reasons]) if states else "no worker answers")
                return False
            if monotonic() >= give_up_s:
                self._say(f"not loaded in {self._asked.timeout_s:g} s")
                return False

    def _has_come(self, since_s: float) -> bool:
        """Whether there is no more to wait for; says how far it is."""
        states = self._states().values()
        for state in states:
            if state.state == "loading":
                self._say(phase(state))
        if any(state.state == "resident" for state in states):
            return True
        settled = monotonic() - since_s > SETTLED_S
        return settled and all(state.state == "unavailable" for state in states)

    async def evict(self) -> bool:
        """Whether it is gone."""
        if kept := _kept(self._entry):
            self._say(f"stays: {kept}")
            return False
        if not await self._known():
            return False
        if not self._where(*_HERE):
            self._say("is not loaded")
            return True
        give_up_s = monotonic() + self._asked.timeout_s
        while True:
            await self._nudge("evict")
            if not self._asked.timeout_s:
                self._say("asked for")
                return True
            left_s = min(EVICT_AGAIN_S, give_up_s - monotonic())
            if await self._hearing.until(lambda: not self._where(*_HERE), left_s):
                self._say("evicted")
                return True
            if monotonic() >= give_up_s:
                self._say(f"still in use on {self._where(*_HERE)}")
                return False

    async def _known(self) -> bool:
        """Waits until a worker that is meant has spoken of the model."""
        worker, heard = self._asked.worker, self._hearing.workers
        begun_s = monotonic()

        def settled() -> bool:  # every worker has spoken, and the one that is meant is not there
            spoken = monotonic() - begun_s > SETTLED_S and bool(heard)
            return bool(self._states()) or (spoken and worker not in (None, *heard))

        await self._hearing.until(settled, KNOWN_S)
        if self._states():
            return True
        if worker is not None and worker not in heard:
            self._say(f"there is no worker `{worker}`{did_you_mean(worker, heard, 3)}")
        else:
            self._say("no worker that serves it answers")
        return False

    def _states(self) -> dict[str, ModelState]:
        return self._hearing.states(self._entry.key, self._asked.worker)

    def _where(self, *wanted: str) -> str:
        """The workers with the model in one of these states, as text."""
        return ", ".join(sorted(w for w, s in self._states().items() if s.state in wanted))

    async def _nudge(self, verb: Literal["load", "evict"]) -> None:
        nudge = Nudge(verb, self._entry.key, self._asked.worker or "")
        await self._queue.tell("nudge", encode(nudge))

    def _say(self, what: str) -> None:
        if what != self._said:
            print(f"{self._entry.key}: {what}", flush=True)
        self._said = what


def _kept(entry: Entry) -> str:
    """Why a model would come back at once, or an empty string."""
    if entry.pinned:
        return "it is pinned (`shoal models unpin` lets it go)"
    if entry.min_replicas:
        return f"its entry keeps {entry.min_replicas} loaded (min_replicas)"
    return ""
