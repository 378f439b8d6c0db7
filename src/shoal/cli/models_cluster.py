"""A running cluster's models and adapters, as a command sees them.

Owns the catalog as it stands on the shelf with the revisions that a change has to name, hearing
the workers for a moment, and names in both. Does not own the looks (`models_list`) or changes
(`models_change`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.catalog.change import Record, clashes, decode_record, parted, shelf_id
from shoal.catalog.schema import Adapter, AnyEntry, Entry
from shoal.catalog.snapshot import Snapshot
from shoal.cli.reach import Reach, opened
from shoal.clock import monotonic
from shoal.core.spelling import did_you_mean
from shoal.errors import CatalogError, UnknownModel
from shoal.queue.interface import Queue
from shoal.wire.envelope import ModelState, Status, UnreadableMessage, decode_status

log = logging.getLogger(__name__)

# A worker speaks every second.
HEARING_S = 1.3
SILENT_S = 5.0


@dataclass(slots=True)
class Shelved:
    """What stands on the shelf.

    Attributes:
        records: by entry id, the one that was written first coming first.
        revisions: of all records, by entry id; also of those that cannot be read.
        faults: why a record is not served, by entry id.
    """

    records: dict[str, Record] = field(default_factory=dict)
    revisions: dict[str, int] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)

    @property
    def everything(self) -> list[AnyEntry]:
        """All that can be read."""
        return [record.entry for record in self.records.values()]

    @property
    def entries(self) -> list[Entry]:
        """The models among it."""
        return parted(self.everything)[0]

    @property
    def adapters(self) -> list[Adapter]:
        """The adapters among it."""
        return parted(self.everything)[1]

    @property
    def snapshot(self) -> Snapshot:
        """The catalog as everybody follows it."""
        return Snapshot(*parted(each for each in self.everything if each.id not in self.faults))


async def read_shelf(queue: Queue) -> Shelved:
    """What stands there now. Raises `QueueUnavailable`."""
    found = Shelved()
    for version in sorted(await queue.catalog.read(), key=lambda each: each.revision):
        name = shelf_id(version.key)
        found.revisions[name] = version.revision
        try:
            found.records[name] = decode_record(version.key, version.data or b"")
        except CatalogError as error:
            found.faults[name] = f"its last record cannot be read: {error.message}"
    found.faults |= clashes(found.everything)
    return found


def named(catalog: Snapshot, name: str) -> Entry:
    """The entry that a person means. Raises `UnknownModel`, with the near names in it."""
    entry = catalog.get(name)
    if entry is not None:
        return entry
    known = [n for each in catalog.entries for n in (each.id, *each.aliases)]
    guess = did_you_mean(name.partition("@")[0], known, max_names=3)
    raise UnknownModel(f"no model `{name}`{guess or '; `shoal models list` shows them'}")


class Hearing:
    """The workers of a pool, as they speak of themselves.

    Attributes:
        workers: the last word of each, and when it was heard, by the worker's name.
    """

    def __init__(self) -> None:
        self.workers: dict[str, tuple[Status, float]] = {}
        self._news = asyncio.Event()

    async def start(self, queue: Queue) -> None:
        """Listens from now on. Raises `QueueUnavailable`."""
        await queue.hear("status", self._on_status)

    def _on_status(self, data: bytes) -> None:
        try:
            status = decode_status(data)
        except UnreadableMessage as error:
            log.debug("status: %s", error)
            return
        self.workers[status.worker] = (status, monotonic())
        self._news.set()

    async def until(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until `done`, which is asked at every word of a worker and each half second."""
        give_up_s = monotonic() + timeout_s
        while not done():
            left_s = give_up_s - monotonic()
            if left_s <= 0:
                return False
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), min(left_s, 0.5))
            except TimeoutError:
                continue
        return True

    def states(self, key: str, worker: str | None = None) -> dict[str, ModelState]:
        """What live workers say of a model, by worker; worker: only of this one."""
        found: dict[str, ModelState] = {}
        since_s = monotonic() - SILENT_S
        for name, (status, heard_s) in self.workers.items():
            state = next((each for each in status.models if each.model == key), None)
            meant = worker in (None, name) and heard_s >= since_s and not status.draining
            if state is not None and meant:
                found[name] = state
        return found


def phase(state: ModelState) -> str:
    """What a person is told of a model's state on a worker: `fetching 40 %`, `resident`."""
    if state.state != "loading":
        return state.state
    if state.load_s and not state.reason.startswith(("fetching", "building")):
        share = min(99, int(100 * state.loading_s / state.load_s))
        return f"{state.reason or 'loading'} {share} %"
    return state.reason or "loading"


async def hear_all(queue: Queue) -> list[Status]:
    """Every live worker's own word, by name; it takes a little longer than a heartbeat."""
    hearing = Hearing()
    await hearing.start(queue)
    await asyncio.sleep(HEARING_S)
    return [hearing.workers[name][0] for name in sorted(hearing.workers)]


def look(reach: Reach) -> tuple[Shelved, list[Status]]:
    """The catalog of a cluster, and what its workers say. Raises as `opened` does."""

    async def work() -> tuple[Shelved, list[Status]]:
        async with opened(reach) as queue:
            statuses = await hear_all(queue)
            return await read_shelf(queue), statuses

    return asyncio.run(work())
