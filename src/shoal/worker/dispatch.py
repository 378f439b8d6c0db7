"""From the windows to the devices, and back to the clients.

Owns the loop schedule -> run -> reply: whenever something has become possible it fills the devices
that are free. Does not own which items run together (`shoal.core.batching`), where models are
(`resident`), or replies and acks (`held`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from shoal.clock import monotonic, wall
from shoal.core.batching import oldest_head
from shoal.core.types import Batch, Lane
from shoal.errors import Bug, RuntimeCrashed, ShoalError
from shoal.ipc.messages import Ran
from shoal.worker.held import Held
from shoal.worker.lines import Line
from shoal.worker.metrics import Metrics
from shoal.worker.resident import Device, Residents

log = logging.getLogger(__name__)


class Dispatch:
    """Sends batches to devices. `on_room` is called with a line that may pull again."""

    def __init__(
        self,
        held: Held,
        residents: Residents,
        lines: Mapping[tuple[str, Lane], Line],
        metrics: Metrics,
        *,
        on_room: Callable[[Line], None],
    ) -> None:
        self._held = held
        self._residents = residents
        self._lines = lines
        self._metrics = metrics
        self._on_room = on_room
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def wake(self) -> None:
        """Something has become possible."""
        self._wake.set()

    async def run(self) -> None:
        """Fills free devices, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._drop_expired()
            await self._fail_hopeless()
            while self._send_next():
                pass

    def _send_next(self) -> bool:
        """Sends one batch, if any line has work and a device for it."""
        open_lines = {id(line.window): line for line in self._lines.values() if len(line.window)}
        while open_lines:
            window = oldest_head(line.window for line in open_lines.values())
            if window is None:
                return False
            line = open_lines.pop(id(window))
            device = self._residents.device_for(line.entry, full_batch=line.full_batch)
            batch = window.next_batch() if device else None
            if device and batch:
                self._send(device, line, batch)
                return True
        return False

    def _send(self, device: Device, line: Line, batch: Batch) -> None:
        now_s = monotonic()
        for item in batch.items:
            held = self._held[item.id]
            held.started_s = now_s
            held.load_s = self._residents.load_wait_s(line.entry, held.arrived_s)
        device.in_flight += 1
        line.on_sent(batch)
        task = asyncio.create_task(self._run(device, line, batch), name="batch")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, device: Device, line: Line, batch: Batch) -> None:
        ran: Ran | ShoalError
        try:
            run_items = [r for i in batch.items if (r := self._held[i.id].run_item)]
            process = self._residents.process(device, line.entry.runtime)
            ran = await (await process.connection()).run(line.entry.key, run_items)
        except RuntimeCrashed as error:
            self._residents.on_lost(device, line.entry.runtime)
            ran = error
        except ShoalError as error:
            ran = error
        except Exception as error:  # task root
            log.exception("a batch was lost")
            ran = Bug(f"{type(error).__name__}: {error}")
        finally:
            # The device is filled again before this batch's replies cost any time.
            device.in_flight -= 1
            line.on_back(batch)
            self._on_room(line)
            while self._send_next():
                pass
        await self._reply(batch, ran)

    async def _reply(self, batch: Batch, ran: Ran | ShoalError) -> None:
        if isinstance(ran, ShoalError):
            log.warning("a batch of %d items failed: %s", len(batch.items), ran)
            for item in batch.items:
                await self._held.fail(item.id, ran)
            return
        self._metrics.on_batch(batch, ran)
        for done in ran.items:
            if done.failure is None:
                await self._held.succeed(done.item, done.result, ran.run_s)
            else:
                await self._held.fail(done.item, done.failure.error())

    async def _drop_expired(self) -> None:
        """The gateway has answered for these already; they never reach a device."""
        now_s = wall()
        for line in self._lines.values():
            for item in line.window.expire(now_s):
                await self._held.drop(item.id)

    async def _fail_hopeless(self) -> None:
        """Answers for models that could not be loaded."""
        for line in self._lines.values():
            error = self._residents.fault(line.entry) if len(line.window) else None
            if error is not None and self._residents.state(line.entry) == "unavailable":
                for item_id in line.window.ids():
                    line.window.remove([item_id])
                    await self._held.fail(item_id, error)

    async def close(self) -> None:
        """Ends what is left."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
