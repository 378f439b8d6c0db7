"""From the policy to the devices, and back to the clients.

Owns the loop schedule -> run -> reply: whenever something has become possible it fills the devices
that are free. A device is free when nothing runs on it, or when what runs is about to end: the next
batch is formed as late as it can be, so that the device does not wait for it.
Does not own which items run together and whose turn it is (`shoal.core.schedule`), where models are
(`resident`), or replies and acks (`held`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping

from shoal.catalog.schema import Entry
from shoal.clock import monotonic
from shoal.core.policy import Place, Policy, Where
from shoal.core.types import Batch, Item, Lane
from shoal.errors import (
    Bug,
    CallerError,
    DeadlineExceeded,
    OutOfMemory,
    RuntimeCrashed,
    ShoalError,
)
from shoal.ipc.messages import Ran, RunItem
from shoal.worker.breaker import Breaker
from shoal.worker.costs import CostBook
from shoal.worker.device import Device, Sent
from shoal.worker.held import Held
from shoal.worker.lines import Line
from shoal.worker.metrics import Metrics
from shoal.worker.resident import Residents

log = logging.getLogger(__name__)

_AFTER_A_BUG_S = 1.0
_MOST_KNOWN_BYTES = 4096


class Dispatch:
    """Sends batches to devices.

    `on_room` is called with a line that may pull again, `on_idle` when a device has let go of a
    model that gets no more batches there; `can_others_serve` says whether another worker could run
    a model that cannot be loaded here.
    """

    def __init__(
        self,
        policy: Policy,
        held: Held,
        residents: Residents,
        lines: Mapping[tuple[str, Lane], Line],
        *,
        metrics: Metrics,
        costs: CostBook,
        run_timeout_s: float,
    ) -> None:
        self.on_room: Callable[[Line], None] = lambda _: None
        self.on_idle: Callable[[], None] = lambda: None
        self.can_others_serve: Callable[[Entry], bool] = lambda _: False
        self._policy = policy
        self._held = held
        self._residents = residents
        self._lines = lines
        self._metrics = metrics
        self._costs = costs
        self._run_timeout_s = run_timeout_s
        self._breaker = Breaker()
        self._known_good: dict[str, RunItem] = {}
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def wake(self) -> None:
        """Something has become possible."""
        self._wake.set()

    def add(self, item: Item) -> bool:
        """Gives a prepared item to the policy; False when its window is full."""
        if not self._policy.add(item, monotonic()):
            return False
        self._lines[(item.model, item.lane)].on_added(item)
        return True

    def remove(self, item_ids: Iterable[str]) -> list[Item]:
        """Takes items out that have not been sent; the others are passed over."""
        items = self._policy.remove(item_ids)
        self._forget(items)
        return items

    def _forget(self, items: Iterable[Item]) -> None:
        for item in items:
            self._lines[(item.model, item.lane)].on_removed([item])

    async def run(self) -> None:
        """Fills free devices, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._fill()  # before anything is dropped: a device that is free tries it
            try:
                await self._drop_hopeless()
            except Exception:  # task root
                log.exception("dropping what cannot be in time")
                await asyncio.sleep(_AFTER_A_BUG_S)
                self.wake()

    def _fill(self) -> None:
        """Sends batches until no free device can get one; then says when to look again.

        Where the policy has a bug, what waits goes back to the queue and the loop goes on.
        """
        try:
            self._fill_devices(monotonic())
        except Exception:  # task root
            log.exception("the policy could not choose a batch")
            for line in self._lines.values():
                if line.waiting:
                    self.strand(line.entry)
            asyncio.get_running_loop().call_later(_AFTER_A_BUG_S, self.wake)

    def _fill_devices(self, now_s: float) -> None:
        while free := self._residents.free(now_s):
            batch = self._policy.next_batch(now_s, len(free), self._where(free))
            if batch is None:
                break
            holders = [device for device in free if device.holds(batch.model)]
            self._send(min(holders, key=lambda d: d.in_flight), batch, now_s)
        self._look_again(now_s)

    def _where(self, free: Collection[Device]) -> Where:
        """Says where models are, of the devices of which these are free."""

        def where(model: str) -> Place:
            if any(device.holds(model) for device in free):
                return "free"
            here = any(model in device.resident for device in self._residents.devices)
            return "busy" if here else "absent"

        return where

    def _look_again(self, now_s: float) -> None:
        """Sets the alarm for the policy's next moment and for devices that are about to be free."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        moments = (
            []
            if not any(line.waiting for line in self._lines.values())
            else [
                *self._residents.stage_moments(now_s),
                *([at] if (at := self._policy.deadline(now_s)) is not None else []),
            ]
        )
        if moments:
            after_s = max(0.001, min(moments) - now_s)
            self._timer = asyncio.get_running_loop().call_later(after_s, self.wake)

    def _send(self, device: Device, batch: Batch, now_s: float) -> None:
        line = self._lines[(batch.model, batch.lane)]
        for item in batch.items:
            held = self._held[item.id]
            held.started_s = now_s
            held.load_s = self._residents.load_wait_s(line.entry, held.submitted_s)
            self._metrics.on_wait(now_s - held.arrived_s + held.queued_s)
        sent = device.on_sent(batch.expected_s, now_s, batch.model, line.entry.process)
        line.on_sent(batch)
        task = asyncio.create_task(self._run(device, sent, line, batch), name="batch")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, device: Device, sent: Sent, line: Line, batch: Batch) -> None:
        ran: Ran | ShoalError
        lost = reached = False
        try:
            run_items = self._held.run_items(item.id for item in batch.items)
            process = self._residents.process(device, line.entry)
            connection, reached = process.live(), True
            async with asyncio.timeout(None) as limit:
                self._limit_from_its_start(sent, limit)
                ran = await self._residents.adapters.run(
                    device, line.entry, connection, run_items, batch.block_tokens
                )
        except TimeoutError:
            ran = RuntimeCrashed(f"the runtime gave no answer in {self._run_timeout_s:.0f} s")
            await self._residents.renew(device, line.entry, "hangs")
            lost = True
        except RuntimeCrashed as error:
            self._residents.on_lost(device, line.entry)
            ran, lost = error, True
        except ShoalError as error:
            ran = error
        except Exception as error:  # task root
            log.exception("a batch was lost")
            ran = Bug(f"{type(error).__name__}: {error}")
        finally:
            now_s = monotonic()
            device.on_back(sent, now_s, lost=lost)
            line.on_back(batch)
            if batch.model in device.closing and not device.is_busy(batch.model):
                self.on_idle()
        took_s = ran.run_s if isinstance(ran, Ran) else None
        try:
            self._policy.finished(batch, took_s, now_s, learn=_is_whole(ran))
        except Exception:  # task root
            log.exception("the policy could not take in that a batch has ended")
        self._fill()  # the device has work again before this batch's replies cost any time
        self.on_room(line)
        if isinstance(ran, Ran) or (sent.begun and reached):
            await self._reply(device, line, batch, ran)
        else:
            await self._send_again(batch, ran)

    def _limit_from_its_start(self, sent: Sent, limit: asyncio.Timeout) -> None:
        """A batch has its time from when it runs, however long the one before it takes."""
        loop = asyncio.get_running_loop()

        def begin() -> None:
            limit.reschedule(loop.time() + self._run_timeout_s)

        if sent.begun:
            begin()
        else:
            sent.on_begun = begin

    async def _send_again(self, batch: Batch, error: ShoalError) -> None:
        """A batch that had not begun when its process died: that costs its items no attempt."""
        for item in batch.items:
            if not self.add(item):
                await self._held.fail(item.id, error)
        self.wake()

    async def _reply(self, device: Device, line: Line, batch: Batch, ran: Ran | ShoalError) -> None:
        self._remember(batch, ran)
        requests = self._held.requests(item.id for item in batch.items)
        await self._answer(device, line, batch, ran)
        await self._judge_process(device, line, ran, requests)

    async def _answer(
        self, device: Device, line: Line, batch: Batch, ran: Ran | ShoalError
    ) -> None:
        if isinstance(ran, ShoalError):
            log.warning("a batch of %d items failed: %s", len(batch.items), ran)
            for item in batch.items:
                await self._held.fail(item.id, ran)
            return
        if _is_whole(ran):
            self._costs.on_batch(line.entry, batch, ran.run_s)
        self._metrics.on_batch(batch, ran)
        if any(d.failure is not None and d.failure.code == OutOfMemory.code for d in ran.items):
            # The host has freed and split already, and a lone item still did not fit.
            await self._residents.renew(device, line.entry, "ran out of memory")
        for done in ran.items:
            if done.failure is None:
                await self._held.succeed(done, ran.run_s)
            else:
                await self._held.fail(done.item, done.failure.error())

    async def _judge_process(
        self, device: Device, line: Line, ran: Ran | ShoalError, requests: set[str]
    ) -> None:
        """Replaces the process of a model that fails everything, or lets the model rest."""
        place = (device.name, line.entry.key)
        why = _whole_failure(ran)
        if why is None:
            self._breaker.on_success(place)
            return
        if isinstance(why, (CallerError, RuntimeCrashed)):
            return
        advice, rest_s = self._breaker.on_failure(place, requests)
        if advice == "go on":
            return
        if await self._is_well(device, line):
            self._breaker.on_success(place)
        elif advice == "renew":
            await self._residents.renew(device, line.entry, f"fails every batch ({why})")
        else:
            await self._residents.rest(device, line.entry, f"fails every batch: {why}", rest_s)

    def _remember(self, batch: Batch, ran: Ran | ShoalError) -> None:
        """Keeps a small item that came out well, to tell a broken process from bad items."""
        if isinstance(ran, ShoalError):
            return
        well = (done.item for done in ran.items if done.failure is None and not done.failures)
        for item in self._held.run_items(well):
            size_bytes = len(item.ids) + sum(map(len, (*item.texts, *item.blobs)))
            if size_bytes <= _MOST_KNOWN_BYTES and not item.adapter:
                self._known_good[batch.model] = item
                return

    async def _is_well(self, device: Device, line: Line) -> bool:
        """Whether the process still runs what it has run before; False where there is no such."""
        known = self._known_good.get(line.entry.key)
        if known is None:
            return False
        try:
            connection = self._residents.process(device, line.entry).live()
            async with asyncio.timeout(self._run_timeout_s):
                ran = await self._residents.adapters.run(
                    device, line.entry, connection, [known], None
                )
        except (ShoalError, TimeoutError) as error:
            log.warning("%s does not run what it ran before: %r", line.entry.key, error)
            return False
        return _whole_failure(ran) is None

    async def _drop_hopeless(self) -> None:
        """Ends what cannot be done in time, and what is for models that cannot be loaded."""
        now_s = monotonic()
        late = self._policy.expire(now_s, self._where(self._residents.free(now_s)))
        self._forget(late)
        for item in late:
            error: ShoalError = DeadlineExceeded("it could not be done by the deadline any more")
            await self._held.fail(item.id, error)
        for line in list(self._lines.values()):
            fault = self._residents.fault(line.entry) if line.waiting else None
            if fault is not None and self._residents.state(line.entry) == "unavailable":
                if self.can_others_serve(line.entry):
                    await self.give_back(line.entry)
                    continue
                waiting = self._held.of_model(line.entry.key)
                for item in self.remove(waiting):
                    await self._held.fail(item.id, fault)

    async def give_back(self, entry: Entry) -> None:
        """What waits here for a model goes back to the queue, for a worker that has it."""
        items = self.remove(self._held.of_model(entry.key))
        if items:
            log.info("%d items of %s go back for another worker", len(items), entry.key)
            await self._held.give_back([item.id for item in items])

    def strand(self, entry: Entry) -> None:
        """As `give_back`, in a task of its own."""
        task = asyncio.create_task(self.give_back(entry), name="give back")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends what is left."""
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _whole_failure(ran: Ran | ShoalError) -> ShoalError | None:
    """Why nothing of a batch came out well, the gravest first; None where something did."""
    if isinstance(ran, ShoalError):
        return ran
    failures = [done.failure for done in ran.items]
    errors = [failure.error() for failure in failures if failure is not None]
    if not errors or len(errors) < len(failures):
        return None
    return min(errors, key=lambda error: isinstance(error, CallerError))


def _is_whole(ran: Ran | ShoalError) -> bool:
    """Whether all of a batch ran: what was refused in a moment says nothing of what work costs."""
    return isinstance(ran, Ran) and not any(done.failure or done.failures for done in ran.items)
