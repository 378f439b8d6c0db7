"""From the queue into the windows.

Owns pulling (one one-shot pull for each line that has room), reading envelopes, fetching large
bodies, preparing items in a bounded thread pool, and cancels. Does not own what is held
(`held`), how much (`lines`), or where a prepared item waits (`placing`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from shoal.catalog.resolve import tokenizer_path
from shoal.catalog.schema import Entry
from shoal.clock import monotonic, wall
from shoal.errors import (
    Bug,
    ModelUnavailable,
    QueueUnavailable,
    RuntimeCrashed,
    ShoalError,
    UnknownModel,
    panics_as_errors,
)
from shoal.ipc.messages import RunItem, Traits
from shoal.queue.interface import Delivery, Queue
from shoal.wire.envelope import (
    Failure,
    Inputs,
    UnreadableMessage,
    decode_cancel,
    decode_envelope,
    decode_inputs,
)
from shoal.worker.held import Held, HeldItem
from shoal.worker.lines import Line
from shoal.worker.placing import Placing
from shoal.worker.residency import Residency
from shoal.worker.roster import Roster
from shoal.worker.tokenise import Prepared, Tokeniser, prepare

log = logging.getLogger(__name__)

# A broker that dies takes its open pulls along: nothing comes until they would have expired.
PULL_EXPIRES_S = 3.0
MAX_CANCELLED = 16_384
START_TRIES = 3
_AGAIN_S = 0.5
_INLINE_ITEMS = 64  # texts for runtimes without ids: so cheap that a thread would cost more
_INLINE_BYTES = 256 * 1024


class Intake:
    """Pulls and prepares. `on_traits` is called with an entry before its first item is placed.

    `will_switch` says whether another runtime is to serve a model whose runtime does not start.
    """

    def __init__(
        self,
        queue: Queue,
        held: Held,
        residency: Residency,
        placing: Placing,
        *,
        roster: Roster,
        cache_dir: Path,
        on_traits: Callable[[Entry, Traits], None],
    ) -> None:
        self._queue = queue
        self._held = held
        self._residency = residency
        self._placing = placing
        self._roster = roster
        self._cache_dir = cache_dir
        self._on_traits = on_traits
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenise")
        self._tokenisers: dict[str, asyncio.Future[Tokeniser]] = {}
        self._pending: dict[str, list[HeldItem]] = {}
        self._preparing: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pulling = True
        self.will_switch: Callable[[Entry, ShoalError], bool] = lambda _entry, _error: False
        self._cancelled: dict[str, None] = {}

    def _spawn(self, work: object, name: str) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def pull_all(self) -> None:
        """Opens a pull for every line that has room and none open."""
        for line in list(self._roster.lines.values()):
            self.pull(line)

    def pull_model(self, entry: Entry) -> None:
        """Opens the pulls of a model that is on its way, and makes its tokenizer ready."""
        for line in self._roster.lines_of(entry.key):
            self.pull(line)
        if self._pulling:
            self._spawn(self._make_ready(entry), f"make ready {entry.key}")

    async def _make_ready(self, entry: Entry) -> None:
        try:
            traits = await self._traits(entry)
            if _reads_ids(entry, traits):
                await self._tokeniser(entry)
        except ShoalError as error:  # the first item that needs it will say so
            log.debug("%s is not ready: %s", entry.key, error)

    def forget(self, entry: Entry) -> None:
        """The model is gone from the catalog, and nothing of it is here."""
        self._tokenisers.pop(entry.key, None)

    def pull(self, line: Line) -> None:
        """Opens a pull for a line if it has room, and its model is here or on its way."""
        size = line.next_pull()
        if size and self._pulling and self._residency.wants(line.entry):
            line.promised = size
            self._spawn(self._pull(line, size), "pull")

    async def _pull(self, line: Line, size: int) -> None:
        if not self._residency.wants(line.entry):  # its last copy has just begun to go
            line.promised = 0
            return
        try:
            await self._queue.pull(
                line.entry.key,
                line.lane,
                max_items=size,
                expires_s=PULL_EXPIRES_S,
                on_delivery=partial(self._on_delivery, line),
                on_end=partial(self._on_pull_end, line),
            )
        except QueueUnavailable as error:
            log.debug("pull: %s", error)
            line.promised = 0
            await asyncio.sleep(_AGAIN_S)
            self.pull(line)

    def _on_pull_end(self, line: Line) -> None:
        line.on_pull_end()
        self.pull(line)

    def _on_delivery(self, line: Line, delivery: Delivery) -> None:
        line.on_delivery()
        try:
            envelope = decode_envelope(delivery.data)
        except UnreadableMessage as error:
            line.on_prepared(0)
            self._spawn(self._bury_unreadable(delivery, str(error)), "bury")
            return
        now_s = wall()
        entry = line.entry
        item = HeldItem(
            delivery,
            envelope,
            monotonic(),
            key=entry.key,
            queued_s=max(0.0, now_s - envelope.submitted_s),
        )
        unwanted = envelope.deadline_s <= now_s or envelope.request in self._cancelled
        if unwanted or not self._held.add(item):
            line.on_prepared(0)
            if unwanted:  # else it is in hand already, and its first delivery will be acked
                self._spawn(delivery.ack(), "drop")
            return
        self._residency.on_arrival(entry.key)
        self._pending.setdefault(entry.key, []).append(item)
        if entry.key not in self._preparing:
            self._preparing.add(entry.key)
            self._spawn(self._prepare(entry), f"prepare {entry.key}")

    async def _bury_unreadable(self, delivery: Delivery, why: str) -> None:
        """Bytes that are no envelope of ours: kept as they are; nobody can be told."""
        try:
            await self._held.bury(delivery, Failure("unreadable", why))
        except QueueUnavailable as error:
            log.warning("an unreadable item comes back: %s", error)
            return
        await delivery.ack()

    async def _prepare(self, entry: Entry) -> None:
        """Prepares what is pending of a model until nothing is; one such task per model."""
        try:
            while self._pending.get(entry.key):
                entry = self._roster.entries.get(entry.key, entry)
                try:
                    await self._prepare_pending(entry)
                except ShoalError as error:
                    await self._end_all(entry, None if self.will_switch(entry, error) else error)
                except Exception as error:  # task root
                    log.exception("preparing items of %s", entry.key)
                    await self._end_all(entry, Bug(f"{type(error).__name__}: {error}"))
        finally:
            self._preparing.discard(entry.key)

    async def _prepare_pending(self, entry: Entry) -> None:
        traits = await self._traits(entry)
        tokeniser = await self._tokeniser(entry) if _reads_ids(entry, traits) else None
        if self._roster.entries.get(entry.key, entry).runtime != entry.runtime:
            return  # another runtime serves it by now
        self._on_traits(entry, traits)
        while self._pending.get(entry.key):
            items = self._pending[entry.key][:_INLINE_ITEMS]
            bodies = [await self._body(item) for item in items]
            work = partial(_prepare_items, entry, traits, tokeniser, items, bodies)
            if tokeniser is None and sum(map(_size_bytes, bodies)) <= _INLINE_BYTES:
                made = work()
            else:
                made = await asyncio.get_running_loop().run_in_executor(self._pool, work)
            del self._pending[entry.key][: len(items)]
            for item, outcome in zip(items, made, strict=True):
                await self._placing.place(entry, item, outcome)
            self._placing.wake()

    async def _traits(self, entry: Entry) -> Traits:
        """What the runtime can do. One that dies at its start is no fault of an item.

        Raises `ModelUnavailable`.
        """
        for last in (*[False] * (START_TRIES - 1), True):
            try:
                return await self._residency.residents.traits(entry)
            except RuntimeCrashed as error:  # the process has its own pause between starts
                if last:
                    raise ModelUnavailable(f"{entry.key}: {error}") from error
        raise Bug("no try was the last")

    async def _tokeniser(self, entry: Entry) -> Tokeniser:
        making = self._tokenisers.get(entry.key)
        if making is None:

            def make() -> Tokeniser:
                bare = entry.family == "static"
                path = tokenizer_path(entry, self._cache_dir)
                with panics_as_errors():
                    return Tokeniser(path, entry.max_tokens, bare=bare)

            # Not in the pool: it may download, and other models' items must not wait for that.
            making = asyncio.ensure_future(asyncio.to_thread(make))
            self._tokenisers[entry.key] = making
        try:
            return await asyncio.shield(making)
        except ShoalError:
            self._tokenisers.pop(entry.key, None)  # it may be there next time
            raise
        except Exception as error:  # task root: whatever a fetch or a file may raise
            self._tokenisers.pop(entry.key, None)
            raise ModelUnavailable(f"{entry.key}: its tokenizer: {error!r}") from error

    async def _body(self, item: HeldItem) -> bytes | ShoalError:
        envelope = item.envelope
        if envelope.payload is None:
            return bytes(envelope.body)
        try:
            return await self._queue.payloads.get(envelope.payload)
        except QueueUnavailable as error:
            return error

    async def _end_all(self, entry: Entry, error: ShoalError | None) -> None:
        """What is pending fails; without an error it goes back, to come again later."""
        for item in self._pending.pop(entry.key, []):
            if line := self._roster.lines.get((entry.key, item.envelope.lane)):
                line.on_prepared(0)
            name = item.envelope.item
            await (self._held.fail(name, error) if error else self._held.give_back([name]))

    def on_cancel(self, data: bytes) -> None:
        """A request's caller has left: what is here of it, or still comes, is dropped unrun."""
        try:
            request = decode_cancel(data).request
        except UnreadableMessage as error:
            log.debug("cancel: %s", error)
            return
        self._cancelled[request] = None
        if len(self._cancelled) > MAX_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]
        for item_id in self._held.of_request(request):
            item = self._held[item_id]
            if item.run_item is None or self._placing.remove(item_id):
                # Now, and not in a task: an item that has just been prepared must not be placed.
                self._held.forget(item_id)
                self._spawn(item.delivery.ack(), "cancel")

    async def stop(self) -> None:
        """Stops pulling; what is here goes on."""
        self._pulling = False
        await self._queue.stop_pulling()

    async def close(self) -> None:
        """Ends what is left."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._placing.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _reads_ids(entry: Entry, traits: Traits) -> bool:
    """Whether its texts are tokenised here; a model of files has none, and an engine its own."""
    return traits.accepts_ids and "text" in entry.inputs and not entry.generates


def _size_bytes(body: bytes | ShoalError) -> int:
    return len(body) if isinstance(body, bytes) else 0


def _prepare_items(
    entry: Entry,
    traits: Traits,
    tokeniser: Tokeniser | None,
    items: Sequence[HeldItem],
    bodies: Sequence[bytes | ShoalError],
) -> list[RunItem | ShoalError]:
    """Prepares items; each has its own outcome. Runs in the pool."""
    made: list[RunItem | ShoalError] = []
    for item, body in zip(items, bodies, strict=True):
        try:
            with panics_as_errors():
                prepared = _prepare_item(entry, traits, tokeniser, item, body)
            item.failures = prepared.failures
            # An item with no input left to run fails with what was wrong with the first.
            made.append(prepared.run_item or next(iter(prepared.failures.values())))
        except ShoalError as error:
            made.append(error)
        except Exception as error:  # task root
            log.exception("an item could not be prepared")
            made.append(Bug(f"preparing the item: {type(error).__name__}: {error}"))
    return made


def _prepare_item(
    entry: Entry,
    traits: Traits,
    tokeniser: Tokeniser | None,
    item: HeldItem,
    body: bytes | ShoalError,
) -> Prepared:
    if isinstance(body, ShoalError):
        raise body
    envelope = item.envelope
    if envelope.revision != entry.revision:
        raise UnknownModel(
            f"this worker has {entry.key}, not revision {envelope.revision}", param="model"
        )
    try:
        inputs: Inputs = decode_inputs(body)
    except UnreadableMessage as error:
        raise Bug(f"the item's body cannot be read: {error}") from error
    return prepare(entry, traits, tokeniser, envelope, inputs)
