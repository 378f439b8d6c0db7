"""What becomes of work when the policy itself has a bug."""

from __future__ import annotations

import asyncio

from shoal.catalog.schema import Entry
from shoal.clock import monotonic, wall
from shoal.core.types import Item
from shoal.errors import Bug
from shoal.worker.dispatch import Dispatch
from shoal.worker.held import Held, HeldItem
from shoal.worker.lines import Line
from shoal.worker.metrics import Metrics
from shoal.worker.resident import Residents
from tests.conftest import until
from tests.support.in_hand import delivered

ENTRY = Entry(id="m", tasks=["encode"], source="file:///")


class BrokenPolicy:
    """Takes items, and raises where a batch is asked for, until it is mended."""

    def __init__(self) -> None:
        self.items: dict[str, Item] = {}
        self.asked = 0
        self.mended = False

    def add(self, item, now):
        self.items[item.id] = item
        return True

    def remove(self, item_ids):
        return [item for each in item_ids if (item := self.items.pop(each, None))]

    def expire(self, now, where):
        return []

    def deadline(self, now):
        return None

    def next_batch(self, now, free_devices, where):
        self.asked += 1
        if not self.mended:
            raise Bug("a batch of nothing")


def test_dispatch_policy_that_raises_strands_nothing(monkeypatch):
    """What waits goes back to the queue, untouched; the loop goes on and asks again."""
    monkeypatch.setattr("shoal.worker.dispatch._AFTER_A_BUG_S", 0.01)

    async def main():
        worker, _, delivery, envelope, _ = await delivered(deadline_s=wall() + 60.0)
        held = Held(worker, worker="w", ack_wait_s=60.0, max_attempts=3, inline_max=10_000)
        held.add(HeldItem(delivery, envelope, monotonic(), key="m@1"))
        rooms = {"sizes": None, "fetches": None, "adapters": None, "on_change": lambda: None}
        residents = Residents(["cpu:0"], threads=1, load_timeout_s=1.0, **rooms)
        line = Line(ENTRY, "interactive", devices=1, window_items=8, budget_tokens=1024)
        policy = BrokenPolicy()
        dispatch = Dispatch(
            *(policy, held, residents, {("m@1", "interactive"): line}),
            metrics=Metrics(),
            costs=None,
            run_timeout_s=1.0,
        )
        running = asyncio.create_task(dispatch.run())
        item = Item("i", "m@1", "interactive", (5,), monotonic() + 60.0, monotonic())
        assert dispatch.add(item)
        dispatch.wake()
        await asyncio.wait_for(held.empty.wait(), 5)
        again = []
        await worker.pull(
            *("m@1", "interactive"),
            max_items=1,
            expires_s=5.0,
            on_delivery=again.append,
            on_end=lambda: None,
        )
        await until(lambda: again)
        assert (again[0].attempt, line.waiting) == (1, 0)
        policy.mended = True
        asked = policy.asked
        dispatch.wake()
        await until(lambda: policy.asked > asked)
        assert not running.done()
        running.cancel()
        await dispatch.close()

    asyncio.run(main())
