"""Texts that grow: from a prepared item to a slot of a generator, and back to the client.

Owns which items of generating models wait and which have begun, the moment each begins, sending on
what grows, and the end of a text that nobody waits for. Does not own whose turn it is
(`shoal.core.slots`), where models are (`resident`), or replies and acks (`held`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from shoal.catalog.schema import Entry
from shoal.clock import monotonic
from shoal.core.lanes import LaneRule
from shoal.core.slots import Slots, Text
from shoal.core.types import Item, Lane
from shoal.errors import (
    Bug,
    CallerError,
    DeadlineExceeded,
    QueueUnavailable,
    RuntimeCrashed,
    ShoalError,
)
from shoal.ipc.messages import ItemDone
from shoal.wire.envelope import Result, encode
from shoal.wire.generation import Generated, Piece, pack
from shoal.worker.costs import CostBook
from shoal.worker.device import Device, Loaded
from shoal.worker.held import Held
from shoal.worker.lines import Line
from shoal.worker.metrics import Metrics
from shoal.worker.resident import Residents

log = logging.getLogger(__name__)

TEND_S = 1.0


@dataclass(slots=True)
class _Model:
    """One generating model here. copies: what of it is loaded, as the slots know it.

    alone: the copies on which a text runs by itself, for it may be what took a process down.
    progress_s: when something last came of a copy that has texts.
    """

    entry: Entry
    slots: Slots
    copies: dict[str, Loaded] = field(default_factory=dict)
    waiting: dict[str, Item] = field(default_factory=dict)
    alone: set[str] = field(default_factory=set)
    progress_s: dict[str, float] = field(default_factory=dict)


class Streams:
    """Gives texts their slots.

    `on_room` is called with a line that may pull again, `can_others_serve` says whether another
    worker could run a model that cannot be loaded here.
    """

    def __init__(
        self,
        held: Held,
        residents: Residents,
        lines: Mapping[tuple[str, Lane], Line],
        lanes: Sequence[LaneRule],
        *,
        metrics: Metrics,
        costs: CostBook,
        run_timeout_s: float,
    ) -> None:
        self.on_room: Callable[[Line], None] = lambda _: None
        self.can_others_serve: Callable[[Entry], bool] = lambda _: False
        self._held = held
        self._residents = residents
        self._lines = lines
        self._lanes = tuple(lanes)
        self._metrics = metrics
        self._costs = costs
        self._run_timeout_s = run_timeout_s
        self._models: dict[str, _Model] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._returning: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Something has become possible."""
        self._wake.set()

    def room(self, entry: Entry, lane: Lane) -> int:
        """How many more items of a line could begin here, those that are on their way counted."""
        model = self._model(entry)
        self._look_at_copies(model)
        lines = [self._lines.get((entry.key, rule.name)) for rule in self._lanes]
        here = sum(line.waiting + line.preparing for line in lines if line is not None)
        return max(0, model.slots.room(lane) - here)

    def add(self, entry: Entry, item: Item) -> None:
        """Takes a prepared item in."""
        self._model(entry).waiting[item.id] = item
        self._lines[(item.model, item.lane)].on_added(item)
        self.wake()

    def stop(self, item_id: str) -> bool:
        """Ends an item that nobody waits for any more: its slot is free at once."""
        task = self._running.get(item_id)
        if task is not None:
            task.cancel()
            return True
        return any(self._forget(model, item_id) for model in self._models.values())

    def forget(self, entry: Entry) -> None:
        """The model is gone from the catalog, and nothing of it is here."""
        self._models.pop(entry.key, None)

    def _model(self, entry: Entry) -> _Model:
        model = self._models.get(entry.key)
        if model is None:
            most_ms = entry.profile.max_token_ms
            slots = Slots(self._lanes, most_ms / 1e3 if most_ms else None)
            model = self._models[entry.key] = _Model(entry, slots)
        return model

    def _forget(self, model: _Model, item_id: str) -> bool:
        item = model.waiting.pop(item_id, None)
        if item is not None and (line := self._lines.get((item.model, item.lane))):
            line.on_removed([item])
        return item is not None

    # --- the loop

    async def run(self) -> None:
        """Begins what can begin, and ends what is hopeless, for ever."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TEND_S)
            self._wake.clear()
            for model in list(self._models.values()):
                await self._drop_hopeless(model)
                await self._end_hanging(model)
                self._fill(model)
                self._offer(model)

    def _look_at_copies(self, model: _Model) -> None:
        """Takes over what has been loaded and what is gone."""
        key = model.entry.key
        now = {d.name: d.resident[key] for d in self._residents.devices if key in d.resident}
        for name in [n for n, loaded in model.copies.items() if now.get(n) is not loaded]:
            del model.copies[name]
            model.slots.close(name)
            model.alone.discard(name)
        for name, loaded in now.items():
            if name not in model.copies:
                model.copies[name] = loaded
                model.slots.open(name, loaded.slots, loaded.kv_tokens)

    def _fill(self, model: _Model) -> None:
        """Begins texts until none can."""
        self._look_at_copies(model)
        while model.waiting:
            solos = [item for item in model.waiting.values() if item.solo]
            candidates = solos or list(model.waiting.values())
            chosen = model.slots.choose(
                (self._text(item) for item in candidates), self._open(model, alone=bool(solos))
            )
            if chosen is None:
                return
            text, name = chosen
            item = model.waiting[text.item]
            self._forget(model, text.item)
            model.slots.take(text, name)
            if item.solo:
                model.alone.add(name)
            self._begin(model, item, self._residents.device(name))

    def _offer(self, model: _Model) -> None:
        """Lets the model's lines pull, where a slot has become free."""
        for rule in self._lanes:
            if line := self._lines.get((model.entry.key, rule.name)):
                self.on_room(line)

    def _open(self, model: _Model, *, alone: bool) -> dict[str, bool]:
        """Which copies may get a text; one that runs alone needs an empty one to itself."""
        key = model.entry.key
        return {
            device.name: device.holds(key)
            and device.name not in model.alone
            and not (alone and model.slots.texts(device.name))
            for device in self._residents.devices
        }

    def _text(self, item: Item) -> Text:
        asked = self._held[item.id].envelope.params.generation
        most = asked.max_tokens if asked is not None else None
        entry = self._models[item.model].entry
        room = max(1, entry.max_tokens - item.tokens)
        return Text(item.id, item.lane, item.tokens, min(most or room, room), item.arrived_s)

    # --- one text

    def _begin(self, model: _Model, item: Item, device: Device) -> None:
        now_s, held = monotonic(), self._held[item.id]
        held.started_s = now_s
        held.load_s = self._residents.load_wait_s(model.entry, held.submitted_s)
        self._metrics.on_wait(now_s - held.arrived_s + held.queued_s)
        loaded = model.copies[device.name]
        if not loaded.texts:
            model.progress_s[device.name] = now_s
        loaded.texts += 1
        self._metrics.texts.labels(model.entry.key).inc()
        task = asyncio.create_task(self._run(model, item, device, loaded), name="text")
        self._running[item.id] = task

    async def _run(self, model: _Model, item: Item, device: Device, loaded: Loaded) -> None:
        begun_s = monotonic()
        ended: Generated | ShoalError | None = None
        pieces = _Pieces(self._held, item.id)

        def on_piece(piece: Piece) -> None:
            model.progress_s[device.name] = monotonic()
            pieces.add(piece)

        try:
            ended = await self._generate(model.entry, item, device, on_piece)
        except asyncio.CancelledError:  # nobody waits for it, or the worker ends
            log.debug("text %s is stopped", item.id)
        finally:
            now_s = monotonic()
            active = loaded.texts
            loaded.texts -= 1
            loaded.used_s = now_s
            model.alone.discard(device.name)
            self._metrics.texts.labels(model.entry.key).dec()
            self._running.pop(item.id, None)
            if isinstance(ended, Generated):
                model.slots.give(item.id, tokens=ended.tokens, token_s=ended.token_s)
                tokens = ended.prompt_tokens + ended.tokens
                self._costs.on_text_grown(model.entry, tokens, (now_s - begun_s) / active)
            else:
                model.slots.give(item.id)
            await pieces.close(flush=ended is not None)
            self._fill(model)
            self._offer(model)
        if ended is not None:
            await self._answer(model.entry, item, ended, pieces, now_s - begun_s)

    async def _generate(
        self, entry: Entry, item: Item, device: Device, on_piece: Callable[[Piece], None]
    ) -> Generated | ShoalError:
        run_item = self._held[item.id].run_item
        if run_item is None:
            return Bug("an item was not prepared")
        try:
            connection = self._residents.process(device, entry).live()
            async with asyncio.timeout(max(0.0, item.deadline_s - monotonic())):
                return await self._residents.adapters.generate(
                    device, entry, connection, run_item, on_piece
                )
        except TimeoutError:
            return DeadlineExceeded("the text was not whole by the deadline")
        except RuntimeCrashed as error:
            self._residents.on_lost(device, entry)
            return error
        except ShoalError as error:
            return error
        except Exception as error:  # task root
            log.exception("a text was lost")
            return Bug(f"{type(error).__name__}: {error}")

    async def _answer(
        self,
        entry: Entry,
        item: Item,
        ended: Generated | ShoalError,
        pieces: _Pieces,
        took_s: float,
    ) -> None:
        if isinstance(ended, Generated):
            self._metrics.on_text(entry.key, ended, took_s)
            result = msgspec.Raw(encode(Result(records=[pack(ended)])))
            await self._held.succeed(ItemDone(item.id, result), took_s)
        else:
            level = logging.DEBUG if isinstance(ended, CallerError) else logging.WARNING
            log.log(level, "a text of %s failed: %s", entry.key, ended)
            # What was sent cannot be taken back, and another attempt would say something else.
            await self._held.fail(item.id, ended, again=not pieces.sent)

    # --- what cannot begin

    async def _drop_hopeless(self, model: _Model) -> None:
        """Ends what is too late, and what is for a model that cannot be loaded."""
        now_s = monotonic()
        for item in [i for i in model.waiting.values() if i.deadline_s <= now_s]:
            self._forget(model, item.id)
            await self._held.fail(item.id, DeadlineExceeded("no slot was free by the deadline"))
        fault = self._residents.fault(model.entry) if model.waiting else None
        if fault is None or self._residents.state(model.entry) != "unavailable":
            return
        waiting = list(model.waiting)
        for item_id in waiting:
            self._forget(model, item_id)
        if self.can_others_serve(model.entry):
            await self._held.give_back(waiting)
            return
        for item_id in waiting:
            await self._held.fail(item_id, fault)

    def strand(self, entry: Entry) -> None:
        """What waits here for a model goes back to the queue, for a worker that has it."""
        model = self._models.get(entry.key)
        waiting = list(model.waiting) if model is not None else []
        if model is None or not waiting:
            return
        for item_id in waiting:
            self._forget(model, item_id)
        log.info("%d texts of %s go back for another worker", len(waiting), entry.key)
        task = asyncio.create_task(self._held.give_back(waiting), name="give back")
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    async def _end_hanging(self, model: _Model) -> None:
        """Ends the process of a copy of which nothing has come for too long."""
        now_s = monotonic()
        for name, loaded in list(model.copies.items()):
            since_s = model.progress_s.get(name, now_s)
            if loaded.texts and now_s - since_s > self._run_timeout_s:
                model.progress_s[name] = now_s
                await self._residents.renew(self._residents.device(name), model.entry, "hangs")

    async def close(self) -> None:
        """Ends what is left; its items stay in hand."""
        tasks = [*self._running.values(), *self._returning]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Pieces:
    """What a text has grown by and nobody has been told yet. `sent`: how many pieces were."""

    def __init__(self, held: Held, item_id: str) -> None:
        self.sent = 0
        self._held = held
        self._item_id = item_id
        asked = held[item_id].envelope.params.generation
        self._wanted = asked is not None and asked.stream
        self._new: list[Piece] = []
        self._more = asyncio.Event()
        self._sending = asyncio.create_task(self._send(), name="pieces") if self._wanted else None

    def add(self, piece: Piece) -> None:
        """Takes a piece; those that come faster than they can be sent go together."""
        if self._wanted:
            self._new.append(piece)
            self._more.set()

    async def _send(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            await self._flush()

    async def _flush(self) -> None:
        if not self._new:
            return
        piece, self._new = _joined(self._new), []
        try:
            await self._held.grow(self._item_id, piece, self.sent)
        except QueueUnavailable as error:  # the whole text comes at the end
            log.debug("a piece of %s: %s", self._item_id, error)
        self.sent += 1

    async def close(self, *, flush: bool) -> None:
        """Sends no more; with `flush`, what is there goes out first."""
        if self._sending is None:
            return
        self._sending.cancel()
        await asyncio.gather(self._sending, return_exceptions=True)
        if flush:
            await self._flush()


def _joined(pieces: Sequence[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    return Piece(
        "".join(piece.text for piece in pieces),
        sum(piece.tokens for piece in pieces),
        [logprob for piece in pieces for logprob in piece.logprobs],
    )
