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
    RuntimeCrashed,
    ShoalError,
    ShuttingDown,
)
from shoal.ipc.messages import ItemDone
from shoal.wire.envelope import Result, encode
from shoal.wire.generation import Generated, Piece, pack
from shoal.worker.costs import CostBook
from shoal.worker.device import Device
from shoal.worker.growth import GeneratorHere, Growth
from shoal.worker.held import Held
from shoal.worker.lines import Line
from shoal.worker.metrics import Metrics
from shoal.worker.pieces import Pieces
from shoal.worker.resident import Residents

log = logging.getLogger(__name__)

TEND_S = 1.0
# Reading a prompt may take so long for each token before an engine counts as hanging.
PROMPT_TOKEN_S = 0.25


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
        self._models: dict[str, GeneratorHere] = {}
        self._growing: dict[str, Growth] = {}
        self._returning: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._closing = False

    def wake(self) -> None:
        """Something has become possible."""
        self._wake.set()

    def room(self, entry: Entry, lane: Lane) -> int:
        """How many more items of a line could begin here, those that are on their way counted.

        One of a model that cannot be loaded: its items are pulled to be told so.
        """
        model = self._model(entry)
        self._look_at_copies(model)
        lines = [self._lines.get((entry.key, rule.name)) for rule in self._lanes]
        here = sum(line.waiting + line.preparing for line in lines if line is not None)
        if self._residents.state(entry) == "unavailable":
            return 0 if here else 1
        return max(0, model.slots.room(lane, self._open(model)) - here)

    def at_once(self, entry: Entry) -> int:
        """How many texts of a model grow here at once when there are plenty."""
        model = self._model(entry)
        self._look_at_copies(model)
        return sum(map(model.slots.at_once, model.copies))

    def add(self, entry: Entry, item: Item) -> None:
        """Takes a prepared item in."""
        self._model(entry).waiting[item.id] = item
        self._lines[(item.model, item.lane)].on_added(item)
        self.wake()

    def stop(self, item_id: str) -> bool:
        """Ends an item that nobody waits for any more: its slot is free at once."""
        growth = self._growing.get(item_id)
        if growth is not None and growth.task is not None:
            growth.task.cancel()
            return True
        return any(self._forget(model, item_id) for model in self._models.values())

    def forget(self, entry: Entry) -> None:
        """The model is gone from the catalog, and nothing of it is here."""
        self._models.pop(entry.key, None)

    def _model(self, entry: Entry) -> GeneratorHere:
        """A model, with its entry as it is now."""
        model = self._models.get(entry.key)
        if model is None:
            model = self._models[entry.key] = GeneratorHere(entry, Slots(self._lanes))
        most_ms = entry.profile.max_token_ms
        model.entry, model.slots.max_token_s = entry, most_ms / 1e3 if most_ms else None
        return model

    def _forget(self, model: GeneratorHere, item_id: str) -> bool:
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
                if line := self._lines.get((model.entry.key, self._lanes[0].name)):
                    self._model(line.entry)
                await self._drop_hopeless(model)
                await self._end_hanging(model)
                self._fill(model)
                self._offer(model)

    def _look_at_copies(self, model: GeneratorHere) -> None:
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

    def _fill(self, model: GeneratorHere) -> None:
        """Begins texts until none can.

        A text that may be what took a process down runs by itself. Those and the others take turns:
        neither waits for all of the other kind.
        """
        self._look_at_copies(model)
        while model.waiting and not self._closing:
            solos = [item for item in model.waiting.values() if item.solo]
            others = [item for item in model.waiting.values() if not item.solo]
            if not solos or not others:
                model.solo_next = bool(solos)
            if not self._begin_one(model, solos if model.solo_next else others):
                if model.solo_next or not solos:
                    return
                model.solo_next = True

    def _begin_one(self, model: GeneratorHere, candidates: Sequence[Item]) -> bool:
        chosen = model.slots.choose(
            (self._text(item) for item in candidates), monotonic(), self._open(model)
        )
        if chosen is None:
            return False
        text, name = chosen
        item = model.waiting[text.item]
        self._forget(model, text.item)
        model.slots.take(text, name)
        if item.solo:
            model.alone.add(name)
            model.solo_next = False
        self._begin(model, item, self._residents.device(name))
        return True

    def _offer(self, model: GeneratorHere) -> None:
        """Lets the model's lines pull, where a slot has become free."""
        for rule in self._lanes:
            if line := self._lines.get((model.entry.key, rule.name)):
                self.on_room(line)

    def _open(self, model: GeneratorHere) -> dict[str, bool]:
        """Which copies may get a text; a text that runs by itself needs an empty one."""
        key = model.entry.key
        return {
            device.name: device.holds(key)
            and device.name not in model.alone
            and not (model.solo_next and model.slots.texts(device.name))
            for device in self._residents.devices
        }

    def _text(self, item: Item) -> Text:
        asked = self._held[item.id].envelope.params.generation
        most = asked.max_tokens if asked is not None else None
        room = max(1, self._models[item.model].entry.max_tokens - item.tokens)
        return Text(item.id, item.lane, item.tokens, min(most or room, room), item.arrived_s)

    # --- one text

    def _begin(self, model: GeneratorHere, item: Item, device: Device) -> None:
        now_s, held, loaded = monotonic(), self._held[item.id], model.copies[device.name]
        held.started_s = now_s
        held.load_s = self._residents.load_wait_s(model.entry, held.submitted_s)
        self._metrics.on_wait(now_s - held.submitted_s)
        # A prompt is read in silence; so is one that comes while others grow.
        patience_s = max(self._run_timeout_s, item.tokens * PROMPT_TOKEN_S)
        if not loaded.texts:
            model.progress_s[device.name] = now_s
            model.patience_s[device.name] = patience_s
        model.patience_s[device.name] = max(patience_s, model.patience_s[device.name])
        loaded.texts += 1
        self._metrics.texts.labels(model.entry.key).inc()
        pieces = Pieces(self._held, item.id)
        growth = Growth(item, device, loaded, loaded.entry, pieces, now_s)
        self._growing[item.id] = growth
        growth.task = asyncio.create_task(self._run(model, growth), name="text")
        # One that is cancelled before its first step never gets to its own end.
        growth.task.add_done_callback(lambda _: self._end(model, growth, None))

    def _end(
        self, model: GeneratorHere, growth: Growth, ended: Generated | ShoalError | None
    ) -> None:
        """Gives the slot back, once."""
        if growth.ended:
            return
        growth.ended = True
        now_s, item, loaded = monotonic(), growth.item, growth.loaded
        at_once = max(loaded.texts, model.slots.at_once(growth.device.name))
        loaded.texts -= 1
        loaded.used_s = now_s
        model.alone.discard(growth.device.name)
        self._metrics.texts.labels(model.entry.key).dec()
        self._growing.pop(item.id, None)
        if isinstance(ended, Generated):
            model.slots.give(item.id, tokens=ended.tokens, token_s=ended.token_s)
            tokens = ended.prompt_tokens + ended.tokens
            self._costs.on_text_grown(growth.entry, tokens, now_s - growth.begun_s, at_once)
        else:
            model.slots.give(item.id)
            growth.pieces.drop()
        self._fill(model)
        self._offer(model)

    async def _run(self, model: GeneratorHere, growth: Growth) -> None:
        ended: Generated | ShoalError | None = None

        def on_piece(piece: Piece) -> None:
            model.progress_s[growth.device.name] = monotonic()
            growth.pieces.add(piece)

        try:
            ended = await self._generate(growth, on_piece)
        except asyncio.CancelledError:  # nobody waits for it, or the worker ends
            log.debug("text %s is stopped", growth.item.id)
            return
        finally:
            self._end(model, growth, ended)
        await growth.pieces.close()
        await self._answer(growth, ended)

    async def _generate(
        self, growth: Growth, on_piece: Callable[[Piece], None]
    ) -> Generated | ShoalError:
        item, device, entry = growth.item, growth.device, growth.entry
        run_item = self._held[item.id].run_item
        if run_item is None:
            return Bug("an item was not prepared")
        connection = None
        try:
            connection = self._residents.process(device, entry).live()
            async with asyncio.timeout(max(0.0, item.deadline_s - monotonic())):
                return await self._residents.adapters.generate(
                    device, entry, connection, run_item, on_piece
                )
        except TimeoutError:
            return DeadlineExceeded("the text was not whole by the deadline")
        except RuntimeCrashed as error:
            if connection is None or connection.lost:
                self._residents.on_lost(device, entry)
            return error
        except ShoalError as error:
            return error
        except Exception as error:  # task root
            log.exception("a text was lost")
            return Bug(f"{type(error).__name__}: {error}")

    async def _answer(self, growth: Growth, ended: Generated | ShoalError) -> None:
        item, took_s = growth.item, monotonic() - growth.begun_s
        if isinstance(ended, Generated):
            self._metrics.on_text(item.model, ended, took_s)
            envelope = self._held[item.id].envelope
            if envelope.payload is None:
                self._costs.on_text(growth.entry, len(bytes(envelope.body)), ended.prompt_tokens)
            result = msgspec.Raw(encode(Result(records=[pack(ended)])))
            await self._held.succeed(ItemDone(item.id, result), took_s)
        else:
            level = logging.DEBUG if isinstance(ended, CallerError) else logging.WARNING
            log.log(level, "a text of %s failed: %s", item.model, ended)
            # What was sent cannot be taken back, and another attempt would say something else.
            await self._held.fail(item.id, ended, again=not growth.pieces.sent)

    # --- what cannot begin

    async def _drop_hopeless(self, model: GeneratorHere) -> None:
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

    async def _end_hanging(self, model: GeneratorHere) -> None:
        """Ends the process of a copy of which nothing has come for too long."""
        now_s = monotonic()
        for name, loaded in list(model.copies.items()):
            since_s = model.progress_s.get(name, now_s)
            if loaded.texts and now_s - since_s > model.patience_s[name]:
                model.progress_s[name] = now_s
                await self._residents.renew(self._residents.device(name), loaded.entry, "hangs")

    async def close(self) -> None:
        """Ends what is left. What nobody has read of goes back to the queue as if it never ran."""
        self._closing = True
        growing = list(self._growing.values())
        tasks = [growth.task for growth in growing if growth.task is not None]
        for task in [*tasks, *self._returning]:
            task.cancel()
        await asyncio.gather(*tasks, *self._returning, return_exceptions=True)
        for growth in growing:
            item_id = growth.item.id
            if growth.pieces.sent:
                left = ShuttingDown("the worker left in the middle of the text")
                await self._held.fail(item_id, left, again=False)
            elif item_id in self._held:
                self._held[item_id].started_s = 0.0
