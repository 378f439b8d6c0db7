"""The worker process: puts its rooms together, runs them, and leaves in order.

Owns start-up, following the catalog, the moments of the heartbeat and the drain. Does not own any
of what happens in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import Coroutine, Sequence
from typing import Any

import uvloop

from shoal.bundles.shelf import shelf_of
from shoal.catalog.follow import Following
from shoal.catalog.load import load
from shoal.catalog.schema import Entry
from shoal.catalog.seed import join
from shoal.clock import monotonic
from shoal.core.lanes import parse_lanes
from shoal.core.residency_plan import ResidencyPlanner
from shoal.core.residency_rank import make_ranking
from shoal.core.schedule import Scheduler
from shoal.errors import QueueUnavailable, ShoalError
from shoal.queue.interface import Queue
from shoal.queue.opening import open_queue
from shoal.settings import WorkerSettings
from shoal.wire.envelope import encode
from shoal.worker.adapters import Adapters
from shoal.worker.bringing import Bringing
from shoal.worker.choice import Choices
from shoal.worker.costs import CostBook
from shoal.worker.devices import parse
from shoal.worker.dispatch import Dispatch
from shoal.worker.fetches import Fetches
from shoal.worker.heartbeat import Heartbeat
from shoal.worker.held import Held
from shoal.worker.intake import Intake
from shoal.worker.memory import Memories
from shoal.worker.metrics import Metrics
from shoal.worker.peers import Peers
from shoal.worker.picture import Picture
from shoal.worker.placing import Placing
from shoal.worker.residency import Residency
from shoal.worker.resident import Residents
from shoal.worker.roster import Roster
from shoal.worker.rules import Rules, policy_of
from shoal.worker.servable import Installed
from shoal.worker.sizes import SizeBook
from shoal.worker.streams import Streams

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
SAVE_TICKS = 30
GARBAGE_OBJECTS = 20_000


class Worker:
    """One machine's worker on a queue. `run` serves until `leave` is called, then drains."""

    def __init__(self, queue: Queue, settings: WorkerSettings) -> None:
        self.name = settings.name or f"{socket.gethostname()}-{os.getpid()}"
        self._queue = queue
        self._settings = settings
        self._following = Following(queue.catalog, on_change=lambda _: self._news.set())
        self._leaving = asyncio.Event()
        self._news = asyncio.Event()
        self._due = asyncio.Event()
        self._lines_to_remove: set[str] = set()
        devices = parse(settings.devices, threads=settings.threads)
        rules = parse_lanes(settings.lanes)
        metrics = Metrics()
        hardware = f"{devices[0].partition('#')[0].partition(':')[0]}x{settings.threads}"
        self._costs = CostBook(settings.cache_dir / "costs.json", hardware)
        self._sizes = SizeBook(settings.cache_dir / "memory.json", hardware)
        self._scheduler = Scheduler(
            rules,
            devices=len(devices),
            mode="oldest" if settings.policy == "oldest" else "fair",
        )
        self._rules = Rules(self._scheduler, self._costs, window_items=settings.window_items)
        self._installed = Installed(devices)
        self._roster = Roster(
            [rule.name for rule in rules],
            devices=len(devices),
            window_items=settings.window_items,
            why_not=self._installed.why_not,
        )
        self._held = Held(
            queue,
            worker=self.name,
            ack_wait_s=settings.ack_wait_s,
            max_attempts=settings.max_attempts,
            inline_max=settings.inline_max_bytes,
        )
        self._peers = Peers(self.name)
        self._shelf = shelf_of(settings)
        self._fetches = Fetches(settings.cache_dir, self._shelf, self._on_fetched)
        residents = self._make_residents(devices)
        self._choices = Choices(self._installed, residents.devices, self._costs)
        self._residency = self._make_residency(devices, residents)
        self._dispatch = Dispatch(
            *(policy_of(settings, self._scheduler), self._held, residents, self._roster.lines),
            metrics=metrics,
            costs=self._costs,
            run_timeout_s=settings.run_timeout_s,
        )
        self._streams = Streams(
            *(self._held, residents, self._roster.lines, rules),
            metrics=metrics,
            costs=self._costs,
            run_timeout_s=settings.run_timeout_s,
        )
        self._intake = self._make_intake(residents.adapters)
        self._heartbeat = Heartbeat(
            *(self.name, self._roster, self._residency, self._held, self._streams),
            costs=self._costs,
            choices=self._choices,
            metrics=metrics,
        )
        self._metrics = metrics
        self._connect_rooms()

    def _make_residents(self, devices: Sequence[str]) -> Residents:
        return Residents(
            devices,
            threads=self._settings.threads,
            load_timeout_s=self._settings.load_timeout_s,
            sizes=self._sizes,
            fetches=self._fetches,
            adapters=Adapters(
                *(self._following.adapter, self._settings.cache_dir, self._installed.most_adapters)
            ),
            on_change=self._on_change,
        )

    def _make_residency(self, devices: Sequence[str], residents: Residents) -> Residency:
        settings = self._settings
        memories = Memories(devices, budget_mib=settings.memory_mib, share=settings.memory_share)
        picture = Picture(
            *(self._roster, residents, memories, self._peers),
            fetches=self._fetches,
            costs=self._costs,
        )
        return Residency(
            *(self._queue, self._roster, picture),
            ResidencyPlanner(make_ranking(settings.residency)),
            memories=memories,
            fetches=self._fetches,
            worker=self.name,
        )

    def _make_intake(self, adapters: Adapters) -> Intake:
        placing = Placing(
            *(self._held, self._roster, self._dispatch, self._streams),
            costs=self._costs,
            bringing=Bringing(self._held, adapters, self._peers),
        )
        return Intake(
            *(self._queue, self._held, self._residency, placing),
            roster=self._roster,
            cache_dir=self._settings.cache_dir,
            on_traits=self._rules.on_traits,
        )

    def _connect_rooms(self) -> None:
        self._dispatch.on_room = self._intake.pull
        self._dispatch.on_idle = self._residency.wake
        self._dispatch.can_others_serve = self._residency.can_others_serve
        self._streams.on_room = self._intake.pull
        self._streams.can_others_serve = self._residency.can_others_serve
        self._roster.slot_room = self._streams.room
        self._residency.on_strand = self._strand
        self._residency.moves.on_open = self._intake.pull_model
        self._residency.moves.on_told = self._tell_status
        self._peers.on_new = self._due.set
        self._choices.on_switch = self._on_switch
        self._choices.has_adapters = self._following.has_adapters
        self._residency.residents.faults.take_over = self._choices.take_over
        self._intake.will_switch = self._choices.will_switch

    def _on_fetched(self, entry: Entry, error: ShoalError | None) -> None:
        self._residency.on_fetched(entry, error)

    def _strand(self, entry: Entry) -> None:
        if entry.generates:
            self._streams.strand(entry)
        else:
            self._dispatch.strand(entry)

    def _on_switch(self, entry: Entry) -> None:
        """Another runtime serves it: what was prepared for the last one comes again."""
        self._roster.replace(entry)
        self._strand(entry)

    def _on_change(self) -> None:
        self._choices.switch_due()
        self._intake.pull_all()  # a copy that others' items were left for until now
        self._dispatch.wake()
        self._streams.wake()
        self._residency.wake()

    def leave(self) -> None:
        """Asks the worker to drain and end."""
        self._leaving.set()

    async def run(self) -> None:
        """Serves until `leave`. Raises `QueueUnavailable` when the queue is not there at start."""
        begun_s = monotonic()
        self._settings.cache_dir.mkdir(parents=True, exist_ok=True)
        await self._installed.look(self._shelf)
        await self._following.start()
        await self._following.recall()
        await self._queue.hear("cancel", self._intake.on_cancel)
        await self._queue.hear("missing", self._held.sent.on_missing)
        await self._queue.hear("status", self._peers.on_status)
        await self._queue.hear("nudge", self._residency.on_nudge)
        self._queue.when_back(self._held.sent.on_back)
        self._queue.when_back(self._following.restore)
        if self._settings.metrics_port is not None:
            self._metrics.serve(self._settings.metrics_port)
        await self._follow()  # which tells others of this worker: it must be able to hear by now
        loops: dict[str, Coroutine[Any, Any, None]] = {
            "dispatch": self._dispatch.run(),
            "streams": self._streams.run(),
            "keep alive": self._held.keep_alive(),
            "heartbeat": self._beat(),
            "residency": self._residency.run(),
            "catalog": self._follow_on(),
        }
        tasks = [asyncio.create_task(loop, name=name) for name, loop in loops.items()]
        leaving = asyncio.create_task(self._leaving.wait(), name="leaving")
        # What was made until now stays; an item leaves no circles, so looking for some is rare.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GARBAGE_OBJECTS, *gc.get_threshold()[1:])
        log.info(
            "worker %s serves %d models on %s, ready in %.2f s",
            self.name,
            len(self._roster.servable()),
            ", ".join(d.name for d in self._residency.residents.devices),
            monotonic() - begun_s,
        )
        try:
            done, _ = await asyncio.wait([*tasks, leaving], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {leaving}:
                task.result()  # a loop that ended has failed: let the supervisor start us anew
        finally:
            await self._drain(tasks)

    # --- the catalog

    async def _follow_on(self) -> None:
        """Takes over what changes in the catalog, for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                await self._follow()
            except QueueUnavailable as error:
                log.warning("the catalog is taken over later: %s", error)
                self._news.set()
                await asyncio.sleep(HEARTBEAT_S)

    async def _follow(self) -> None:
        """Brings lines, rules and copies to the catalog as it is now. Raises `QueueUnavailable`."""
        pool = self._settings.pool
        at_work = self._residency.at_work() | {item.key for item in self._held.items()}
        still = [entry for key, entry in self._roster.entries.items() if key in at_work]
        current = [self._choices.served(entry) for entry in self._following.entries(pool)]
        retired = [self._choices.served(entry) for entry in self._following.retired(pool)]
        await self._let_go({entry.key for entry in [*current, *retired, *still]})
        change = self._roster.follow(current, [*retired, *still])
        for entry in change.changed:
            self._residency.residents.on_entry(entry)
            self._rules.on_entry(entry)
        for key in self._roster.retired:
            self._fetches.give_up(key)
        self._choices.switch_due()
        self._residency.residents.adapters.on_catalog(self._residency.residents.devices)
        self._lines_to_remove |= {entry.key for entry in change.gone}
        self._lines_to_remove -= self._roster.entries.keys()
        if change.added or change.changed or change.gone:
            log.info(
                "catalog: %d models came, %d changed, %d left",
                *(len(change.added), len(change.changed), len(change.gone)),
            )
            await self._tell_status()
        self._residency.wake()
        await self._remove_lines()

    async def _let_go(self, wanted: set[str]) -> None:
        """Parts with the models that nobody wants any more, while their lines are still known."""
        for entry in [e for key, e in self._roster.entries.items() if key not in wanted]:
            for line in self._roster.lines_of(entry.key):
                await self._queue.withdraw(entry.key, line.lane)
            self._residency.part_with(entry)
            self._intake.forget(entry)
            self._choices.forget(entry.key)
            self._streams.forget(entry)
            self._rules.forget(entry)

    async def _remove_lines(self) -> None:
        """Removes lines at the broker; what fails, or still holds items, is due again."""
        if self._lines_to_remove:
            removed = await self._queue.remove_lines(list(self._lines_to_remove))
            self._lines_to_remove.difference_update(removed)

    # --- the heartbeat

    async def _beat(self) -> None:
        ticks = 0
        while True:
            await self._tell_status()
            self._due.clear()
            with contextlib.suppress(TimeoutError):  # a worker that is new is answered at once
                await asyncio.wait_for(self._due.wait(), HEARTBEAT_S)
                continue
            ticks += 1
            if ticks % SAVE_TICKS == 0:
                self._save()
                found = await asyncio.to_thread(self._roster.servable_by_now)
                self._roster.admit(found)
                self._news.set()  # what has been retired for long enough is forgotten
            # Also the tick that nothing can fall asleep behind: cool-downs, deadlines, lost pulls.
            self._set_budgets()
            for entry in self._choices.due:
                self._residency.moves.spawn_evictions(entry, "another runtime is to serve it")
            self._intake.pull_all()
            self._dispatch.wake()

    async def _tell_status(self) -> None:
        try:
            status = self._heartbeat.status(draining=self._leaving.is_set())
            await self._queue.tell("status", encode(status))
        except QueueUnavailable as error:
            log.debug("heartbeat: %s", error)

    def _set_budgets(self) -> None:
        """The scheduler's gauges, and how much a full batch of each line is."""
        self._metrics.urgent.set(self._scheduler.urgent_batches)
        self._metrics.debt_s.set(self._scheduler.debt_s)
        if self._settings.policy in ("fair", "oldest"):
            self._rules.set_budgets(self._roster.lines)

    def _save(self) -> None:
        self._costs.save()
        self._sizes.save()

    async def _drain(self, tasks: list[asyncio.Task[None]]) -> None:
        """Stops pulling, finishes or gives back what is held, then ends the runtimes."""
        self._leaving.set()
        self._residency.stop_loading()
        await self._intake.stop()
        await self._tell_status()
        try:
            async with asyncio.timeout(self._settings.drain_s):
                await self._held.empty.wait()
        except TimeoutError:
            log.warning("%d items go back to the queue unfinished", len(self._held))
        for task in tasks:
            task.cancel()
        await self._intake.close()
        await self._dispatch.close()
        await self._streams.close()
        await self._residency.close()
        await self._held.give_back_all()
        await self._residency.residents.stop()
        self._save()
        await self._queue.close()


async def _serve(settings: WorkerSettings) -> None:
    load(settings.catalog)  # a faulty folder is an error now, and not when it is needed
    queue = await open_queue(settings, name="shoal worker")
    await join(queue.catalog, settings.catalog)
    worker = Worker(queue, settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.leave)
    await worker.run()


def run(settings: WorkerSettings) -> None:
    """Runs a worker until SIGTERM or SIGINT."""
    uvloop.run(_serve(settings))
