"""The worker process: puts its rooms together, runs them, and leaves in order.

Owns start-up (which models can be served here), the heartbeat and the drain. Does not own any of
what happens in between.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys

import uvloop

from shoal.catalog.load import load
from shoal.catalog.resolve import model_spec
from shoal.catalog.schema import Entry
from shoal.clock import monotonic
from shoal.core.baselines import BaselinePolicy
from shoal.core.lanes import parse_lanes
from shoal.core.schedule import ModelRule, Policy, Scheduler
from shoal.core.types import Lane
from shoal.errors import ModelUnavailable, OperatorError, QueueUnavailable
from shoal.ipc.messages import Traits
from shoal.queue.interface import Queue
from shoal.queue.opening import open_queue
from shoal.settings import WorkerSettings
from shoal.wire.envelope import ModelState, Status, encode
from shoal.worker.costs import CostBook
from shoal.worker.devices import parse
from shoal.worker.dispatch import Dispatch
from shoal.worker.held import Held
from shoal.worker.intake import Intake
from shoal.worker.lines import Line
from shoal.worker.metrics import Metrics
from shoal.worker.resident import Residents

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
SAVE_TICKS = 30
PROBE_S = 60.0
GARBAGE_OBJECTS = 20_000


class Worker:
    """One machine's worker on a queue. `run` serves until `leave` is called, then drains."""

    def __init__(self, queue: Queue, settings: WorkerSettings, entries: list[Entry]) -> None:
        self.name = settings.name or f"{socket.gethostname()}-{os.getpid()}"
        self._queue = queue
        self._settings = settings
        self._entries = entries
        self._leaving = asyncio.Event()
        self._unservable: dict[str, str] = {}
        self._states: list[ModelState] = []
        self._lines: dict[tuple[str, Lane], Line] = {}
        devices = parse(settings.devices, threads=settings.threads)
        self._rules = parse_lanes(settings.lanes)
        self._metrics = Metrics()
        hardware = f"{devices[0].partition('#')[0].partition(':')[0]}x{settings.threads}"
        self._costs = CostBook(settings.cache_dir / "costs.json", hardware)
        self._scheduler = Scheduler(
            self._rules,
            devices=len(devices),
            mode="oldest" if settings.policy == "oldest" else "fair",
        )
        self._scheduled: set[str] = set()
        self._held = Held(
            queue,
            worker=self.name,
            ack_wait_s=settings.ack_wait_s,
            max_attempts=settings.max_attempts,
            inline_max=settings.inline_max_bytes,
        )
        self._residents = Residents(
            devices,
            threads=settings.threads,
            cache_dir=settings.cache_dir,
            load_timeout_s=settings.load_timeout_s,
            on_change=self._on_change,
        )
        self._dispatch = Dispatch(
            _policy(settings, self._scheduler),
            self._held,
            self._residents,
            self._lines,
            metrics=self._metrics,
            costs=self._costs,
            run_timeout_s=settings.run_timeout_s,
        )
        self._intake = Intake(
            queue,
            self._held,
            self._residents,
            self._dispatch,
            costs=self._costs,
            lines=self._lines,
            cache_dir=settings.cache_dir,
            on_traits=self._on_traits,
        )
        self._dispatch.on_room = self._intake.pull

    def _on_change(self) -> None:
        self._dispatch.wake()

    def _on_traits(self, entry: Entry, traits: Traits) -> None:
        """How a model is scheduled is known once its runtime has said what it can do."""
        if entry.id in self._scheduled:
            return
        self._scheduled.add(entry.id)
        rule = ModelRule(
            entry.id,
            weight=entry.weight,
            packing=traits.packing and entry.options.get("packing") is not False,
            block_tokens=entry.profile.batch_tokens,
            max_items=self._settings.window_items,
            max_batch_tokens=entry.profile.max_batch_tokens,
        )
        self._scheduler.add_model(rule, self._costs.model(entry))

    def leave(self) -> None:
        """Asks the worker to drain and end."""
        self._leaving.set()

    async def run(self) -> None:
        """Serves until `leave`. Raises `QueueUnavailable` when the queue is not there at start."""
        begun_s = monotonic()
        self._settings.cache_dir.mkdir(parents=True, exist_ok=True)
        runtimes = await probe_runtimes()
        for entry in self._entries:
            reason = why_not(entry, runtimes, self._settings)
            if reason:
                log.warning("model %s cannot be served here: %s", entry.id, reason)
                self._unservable[entry.id] = reason
                continue
            for rule in self._rules:
                self._lines[(entry.id, rule.name)] = Line(
                    entry,
                    rule.name,
                    devices=len(self._residents.devices),
                    window_items=self._settings.window_items,
                    budget_tokens=entry.profile.batch_tokens,
                )
        await self._queue.ensure_lines({model for model, _ in self._lines})
        await self._queue.hear("cancel", self._intake.on_cancel)
        await self._queue.hear("missing", self._held.sent.on_missing)
        self._queue.when_back(self._held.sent.on_back)
        if self._settings.metrics_port is not None:
            self._metrics.serve(self._settings.metrics_port)
        tasks = [
            asyncio.create_task(self._dispatch.run(), name="dispatch"),
            asyncio.create_task(self._held.keep_alive(), name="keep alive"),
            asyncio.create_task(self._heartbeat(), name="heartbeat"),
        ]
        leaving = asyncio.create_task(self._leaving.wait(), name="leaving")
        # What was made until now stays; an item leaves no circles, so looking for some is rare.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GARBAGE_OBJECTS, *gc.get_threshold()[1:])
        self._intake.pull_all()
        self._load_pinned()
        log.info(
            "worker %s serves %d models on %s, ready in %.2f s",
            self.name,
            len({model for model, _ in self._lines}),
            ", ".join(d.name for d in self._residents.devices),
            monotonic() - begun_s,
        )
        try:
            done, _ = await asyncio.wait([*tasks, leaving], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {leaving}:
                task.result()  # a loop that ended has failed: let the supervisor start us anew
        finally:
            await self._drain(tasks)

    def _load_pinned(self) -> None:
        for entry in self._entries:
            if entry.pinned and entry.id not in self._unservable:
                for device in self._residents.devices:
                    self._residents.load(entry, device)

    async def _heartbeat(self) -> None:
        ticks = 0
        while True:
            await self._tell_status()
            await asyncio.sleep(HEARTBEAT_S)
            ticks += 1
            if ticks % SAVE_TICKS == 0:
                self._costs.save()
            # Also the tick that nothing can fall asleep behind: cool-downs, deadlines, lost pulls.
            self._intake.pull_all()
            self._dispatch.wake()

    async def _tell_status(self) -> None:
        states: list[ModelState] = []
        for entry in self._entries:
            reason = self._unservable.get(entry.id)
            fault = self._residents.fault(entry)
            state = "unavailable" if reason else self._residents.state(entry)
            rates = self._costs.rates(entry)
            why = reason or (fault.message if fault else "")
            token_s = self._costs.token_s(entry)
            states.append(ModelState(entry.id, state, why, token_s, rates.bytes_per_token))
        self._measure()
        status = Status(
            self.name,
            states,
            devices=len(self._residents.devices),
            held_items=len(self._held),
            draining=self._leaving.is_set(),
        )
        try:
            await self._queue.tell("status", encode(status))
        except QueueUnavailable as error:
            log.debug("heartbeat: %s", error)

    def _measure(self) -> None:
        """What changes slowly: budgets, gauges."""
        for (model, lane), line in self._lines.items():
            if model in self._scheduled and self._settings.policy in ("fair", "oldest"):
                line.budget_tokens = self._scheduler.budget_tokens(model, lane)
            self._metrics.window.labels(model, lane).set(line.waiting)
        self._metrics.held.set(len(self._held))
        self._metrics.urgent.set(self._scheduler.urgent_batches)
        self._metrics.debt_s.set(self._scheduler.debt_s)

    async def _drain(self, tasks: list[asyncio.Task[None]]) -> None:
        """Stops pulling, finishes or gives back what is held, then ends the runtimes."""
        self._leaving.set()
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
        await self._held.give_back_all()
        await self._residents.stop()
        self._costs.save()
        await self._queue.close()


def _policy(settings: WorkerSettings, scheduler: Scheduler) -> Policy:
    """The scheduler, or the baseline that the settings ask for."""
    if settings.policy == "fair" or settings.policy == "oldest":  # noqa: PLR1714 - mypy narrows it
        return scheduler
    return BaselinePolicy(settings.policy, max_items=settings.window_items)


async def probe_runtimes() -> dict[str, str | None]:
    """Which runtimes this environment can run; see `shoal.runtimes.probe`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "shoal.runtimes.probe"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(PROBE_S):
        output, _ = await process.communicate()
    if process.returncode != 0:
        raise OperatorError("the runtimes of this environment cannot be listed")
    found: dict[str, str | None] = json.loads(output)
    return found


def why_not(entry: Entry, runtimes: dict[str, str | None], settings: WorkerSettings) -> str | None:
    """Why this worker cannot serve an entry; None when it can (as far as is known unloaded)."""
    if entry.runtime not in runtimes:
        return f"runtime `{entry.runtime}` is unknown here; known are {', '.join(runtimes)}"
    if runtimes[entry.runtime]:
        return runtimes[entry.runtime]
    if entry.source.startswith("hf://"):
        return None  # fetched when it is first needed
    try:
        model_spec(entry, settings.cache_dir)
    except ModelUnavailable as error:
        return error.message
    return None


async def _serve(settings: WorkerSettings) -> None:
    snapshot = load(settings.catalog)
    queue = await open_queue(settings, name="shoal worker")
    entries = [entry for entry in snapshot.entries if entry.pool == settings.pool]
    worker = Worker(queue, settings, entries)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.leave)
    await worker.run()


def run(settings: WorkerSettings) -> None:
    """Runs a worker until SIGTERM or SIGINT."""
    uvloop.run(_serve(settings))
