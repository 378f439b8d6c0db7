"""What may lie in a line, under callers that come, go and give up in any order."""

from __future__ import annotations

import asyncio
import random

import pytest

from shoal.gateway.pacing import FIRST_ROOM, Pacing

WINDOW = 30.0
LINES = [("interactive", "a"), ("bulk", "a")]


class Crowd:
    """Callers of one gateway, and what of theirs lies in lines."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.pacing = Pacing(lambda _: WINDOW)
        self.there: list[tuple[tuple[str, str], str | None, float]] = []
        self.tasks: list[tuple[asyncio.Task, asyncio.Future]] = []

    def come(self):
        over = asyncio.get_running_loop().create_future()
        who = self.rng.choice(LINES), self.rng.choice(["x", "y", None])
        self.tasks.append((asyncio.create_task(self._call(*who, over)), over))

    async def _call(self, line, tenant, over):
        for n in range(self.rng.randint(1, 6)):
            size = self.rng.choice([1.0, 5.0, 20.0, 50.0])
            if not await self.pacing.enter(line, tenant, size, over, first=n == 0):
                return
            self.there.append((line, tenant, size))

    def give_up(self):
        task, over = self.rng.choice(self.tasks)
        if self.rng.random() < 0.5:
            task.cancel()
        elif not over.done():
            over.set_result(None)

    def leave(self):
        self.pacing.leave(*self.there.pop(self.rng.randrange(len(self.there))))

    def check(self):
        for line, shares in self.pacing._lines.items():
            for tenant, share in shares.items():
                sizes = [s for at, who, s in self.there if (at, who) == (line, tenant)]
                assert share.size == pytest.approx(sum(sizes))
                assert len(sizes) <= 1 or sum(sizes) <= WINDOW * FIRST_ROOM


@pytest.mark.parametrize("seed", range(20))
def test_pacing_keeps_its_window_and_forgets_nobody(seed):
    """No tenant has more in a line than the window, unless it is one item; all come in at last.

    Nothing is left of those who gave up, while they waited or at the moment they were let in.
    """

    async def main():
        crowd = Crowd(random.Random(seed))
        for _ in range(200):
            act = crowd.rng.random()
            if act < 0.3:
                crowd.come()
            elif act < 0.7 and crowd.there:
                crowd.leave()
            elif act < 0.8 and crowd.tasks:
                crowd.give_up()
            if crowd.rng.random() < 0.7:
                for _ in range(20):
                    await asyncio.sleep(0)
                crowd.check()
        async with asyncio.timeout(10):
            while crowd.there or not all(task.done() for task, _ in crowd.tasks):
                while crowd.there:
                    crowd.leave()
                await asyncio.sleep(0)
        assert (crowd.pacing._lines, crowd.pacing._n_waiting) == ({}, {})

    asyncio.run(main())
