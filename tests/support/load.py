"""Callers that send requests with contents of their own, and write down what comes of each."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from tests.support.connection import Connection, Reply, Severed
from tests.support.fleet import Fleet
from tests.support.ledger import Ask, Ledger, Row, judge
from tests.support.pace import limit_s

GRACE_S = 3.0
UNREAD_S = 0.15
PAUSE_S = 0.1

Draw = Callable[[int], Ask]


def plain(n: int) -> Ask:
    """Every tenth request is large (many items), every seventh in the bulk lane."""
    texts = [f"ask {n} text {i}" for i in range(150 if n % 10 == 9 else 1 + n % 3)]
    return Ask(f"ask-{n}", "echo", texts, limit_s(10), "bulk" if n % 7 == 6 else "interactive")


@dataclass
class Load:
    """Callers on a fleet, from entering to leaving the block; each has a connection of its own.

    draw: makes request number n. retry: a request that no gateway has accepted goes to the next
    gateway, as a careful client does. grace_s: on a fast machine.
    """

    fleet: Fleet
    draw: Draw = plain
    callers: int = 8
    retry: bool = False
    grace_s: float = GRACE_S
    ledger: Ledger = field(default_factory=Ledger)
    stopping: bool = False

    async def __aenter__(self) -> Self:
        self.begun_s = time.monotonic()
        self._numbers = itertools.count()
        self._tasks = [asyncio.create_task(self._caller(i)) for i in range(self.callers)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stopping = True
        await asyncio.gather(*self._tasks)

    async def answers(self, n: int, timeout_s: float = 20.0) -> None:
        """Waits until n requests more have been answered. Raises TimeoutError."""
        want = len(self.ledger.of("answered")) + n
        async with asyncio.timeout(limit_s(timeout_s)):
            while len(self.ledger.of("answered")) < want:
                self.check()
                await asyncio.sleep(0.01)

    def check(self) -> None:
        """Fails at once when something was lost, crossed or unclear."""
        rows = [row for row in self.ledger.faults if row.verdict != "open"]
        assert not rows, f"{self.ledger}\n{self.fleet.output}"
        for task in self._tasks:
            if task.done() and not self.stopping:
                task.result()

    async def _caller(self, i: int) -> None:
        gateways = len(self.fleet.ports)
        open_to: dict[int, Connection] = {}
        at = i % gateways
        while not self.stopping:
            ask = self.draw(next(self._numbers))
            give_up = time.monotonic() + ask.deadline_s
            while True:
                row = await self._attempt(ask, at, open_to)
                if row.verdict == "answered" or row.verdict.startswith("failed"):
                    break
                at = (at + 1) % gateways
                if row.verdict in ("unreachable", "unread") or row.verdict.startswith("refused"):
                    await asyncio.sleep(PAUSE_S)
                    if self.retry and time.monotonic() < give_up:
                        continue
                break
        for connection in open_to.values():
            self.ledger.stray_bytes += connection.stray_bytes
            connection.close()

    async def _attempt(self, ask: Ask, gateway: int, open_to: dict[int, Connection]) -> Row:
        begun_s = time.monotonic()
        row = Row(ask, gateway, begun_s - self.begun_s)
        self.ledger.rows.append(row)
        connection = open_to.get(gateway)
        try:
            if connection is None or connection.lost:
                epoch = self.fleet.epochs[gateway]
                connection = open_to[gateway] = await Connection.open(self.fleet.ports[gateway])
                connection.epoch = epoch
            reply = await self._in_time(connection, ask, gateway)
        except Severed as error:
            row.took_s = time.monotonic() - begun_s
            row.verdict, row.detail = "severed", str(error)
            epoch = self.fleet.epochs[gateway]
            if epoch == connection.epoch and epoch % 2 == 0:  # the gateway lives
                row.verdict = "lost"
            elif row.took_s < limit_s(UNREAD_S) and not error.begun:
                row.verdict = "unread"  # it closed an idle connection as we used it
        except TimeoutError:
            row.took_s, row.verdict = time.monotonic() - begun_s, "lost"
            row.detail = "no answer at the deadline"
            connection.close()
        except OSError as error:
            row.verdict, row.detail = "unreachable", str(error)
        else:
            row.took_s = time.monotonic() - begun_s
            verdict = ("left", "") if reply is None else judge(ask, reply, row.took_s)
            row.verdict, row.detail = verdict
            if connection.stray_bytes:  # an answer more than was asked for
                row.verdict, row.detail = "duplicate", f"{connection.stray_bytes} bytes too many"
        return row

    async def _in_time(self, connection: Connection, ask: Ask, gateway: int) -> Reply | None:
        """What `send` gives. Raises TimeoutError at the deadline and the grace.

        A gateway that was stopped meanwhile may be late by as long.
        """
        late_s = self.fleet.late_s[gateway]
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(ask.deadline_s + limit_s(self.grace_s)) as limit:
            sending = asyncio.ensure_future(self.send(connection, ask))
            try:
                while not sending.done():
                    await asyncio.wait([sending], timeout=0.25)
                    if (more_s := self.fleet.late_s[gateway] - late_s) > 0:
                        late_s += more_s
                        limit.reschedule((limit.when() or loop.time()) + more_s)
                return sending.result()
            finally:
                sending.cancel()

    async def send(self, connection: Connection, ask: Ask) -> Reply | None:
        """The answer to a request; None to a caller who does not wait for it."""
        return await connection.post("/v1/encode", ask.body, ask.headers)
