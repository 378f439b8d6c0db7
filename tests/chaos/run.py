"""One chaos run: real processes, a mixed load, seeded faults, and the account of it.

Owns carrying out what `tests.chaos.plan` has decided. With memory storage a broker's restart loses
what was queued, by design: such requests must fail at their deadline, and are not lost.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.plan import MODELS, Fault, draw, schedule
from tests.support.connection import Connection, Reply, head
from tests.support.fleet import Fleet
from tests.support.ledger import Ask, Ledger
from tests.support.load import Load, plain
from tests.support.pace import limit_s

FLAGS = ("--ack-wait-s", str(limit_s(2)), "--inline-max-bytes", "20000")
# A gateway that is stopped for a while answers late; how long is added up from the schedule.
GRACE_S = 4.0
CALLERS = 16
AFTER = 60


class ChaosLoad(Load):
    """Callers of all manners, each a little pensive."""

    async def send(self, connection: Connection, ask: Ask) -> Reply | None:
        """The answer, or None to a client that did not wait for it."""
        rng = random.Random(ask.name)
        await asyncio.sleep(rng.uniform(0, 0.06))
        if ask.manner == "breaks off":
            body = ask.body
            connection.write(head("/v1/encode", len(body), ask.headers) + body[: len(body) // 2])
            await asyncio.sleep(rng.uniform(0, 0.1))
            connection.close()
            return None
        if ask.manner == "leaves":
            answer = asyncio.ensure_future(super().send(connection, ask))
            done, _ = await asyncio.wait([answer], timeout=rng.uniform(0, 0.3))
            if done:
                return answer.result()
            answer.cancel()
            connection.close()
            return None
        if ask.manner == "dawdles":
            loop = asyncio.get_running_loop()
            connection.pause_reading()
            loop.call_later(rng.uniform(0.2, 2.0), connection.resume_reading)
        return await super().send(connection, ask)


@dataclass
class Blows:
    """Strikes a fleet. One part takes one blow at a time; parts take theirs independently."""

    fleet: Fleet
    complaints: list[str] = field(default_factory=list)
    busy: dict[tuple[str, int], asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock)
    )

    async def all(self, faults: list[Fault], begun_s: float) -> None:
        """Every fault at its moment; returns when all parts are there again."""
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                await asyncio.sleep(begun_s + fault.at_s - time.monotonic())
                group.create_task(self._strike(fault))

    async def _strike(self, fault: Fault) -> None:
        part = "worker" if fault.part == "runtime" else fault.part
        async with self.busy[part, fault.target]:
            if fault.blow == "stop":
                await self._pause(fault)
            elif fault.part == "runtime":
                self.fleet.kill_runtime(fault.target)
            elif fault.part == "broker":
                await self._restart_broker(fault)
            else:
                await self._restart(fault)

    async def _pause(self, fault: Fault) -> None:
        if fault.part == "runtime":
            processes = self.fleet.runtimes(fault.target)
        elif fault.part == "broker":
            processes = [self.fleet.nats.process]
        else:
            group = {"worker": self.fleet.workers, "gateway": self.fleet.gateways}[fault.part]
            processes = [group[fault.target].process]
        if fault.part == "gateway":
            self.fleet.late_s[fault.target] += fault.hold_s
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(fault.hold_s)
        for process in processes:
            process.send_signal(signal.SIGCONT)

    async def _restart_broker(self, fault: Fault) -> None:
        nats = self.fleet.nats
        nats.process.send_signal(signal.SIGKILL if fault.blow == "kill" else signal.SIGTERM)
        await asyncio.to_thread(nats.process.wait)
        await asyncio.sleep(fault.hold_s)
        await asyncio.to_thread(nats.start)

    async def _restart(self, fault: Fault) -> None:
        fleet, i = self.fleet, fault.target
        number = signal.SIGKILL if fault.blow == "kill" else signal.SIGTERM
        end, start = {
            "worker": (fleet.end_worker, fleet.start_worker),
            "gateway": (fleet.end_gateway, fleet.start_gateway),
        }[fault.part]
        status = await asyncio.to_thread(end, i, number)
        if status != (-signal.SIGKILL if fault.blow == "kill" else 0):
            self.complaints.append(f"{fault}: it left with status {status}")
        await asyncio.sleep(fault.hold_s)
        await asyncio.to_thread(start, i)


@dataclass(frozen=True)
class Story:
    """What came of a run. complaints: what must not be, beside the ledger's faults."""

    faults: list[Fault]
    ledger: Ledger
    complaints: list[str]
    output: str

    @property
    def clean(self) -> bool:
        """Whether everything was as it must be."""
        return self.ledger.clean and not self.complaints


def run(folder: Path, *, seed: str, length_s: float, storage: str) -> Story:
    """Runs for about `length_s` seconds."""
    fleet = Fleet(folder, *FLAGS, "--storage", storage, gateways=2, workers=2, models=MODELS)
    try:
        return asyncio.run(_run(fleet, seed, length_s))
    finally:
        fleet.close()


async def _run(fleet: Fleet, seed: str, length_s: float) -> Story:
    faults = schedule(seed, length_s)
    load = ChaosLoad(fleet, lambda n: draw(seed, n), callers=CALLERS, grace_s=GRACE_S)
    blows = Blows(fleet)
    complaints = blows.complaints
    async with load:
        await blows.all(faults, load.begun_s)
        await asyncio.sleep(load.begun_s + length_s - time.monotonic())
    complaints += [
        f"{p.process.args[3]} left by itself with status {p.process.poll()}"
        for p in (*fleet.gateways, *fleet.workers)
        if p.process.poll() is not None
    ]
    complaints += await _after(fleet)
    complaints += [f"a traceback in an output:\n{each}" for each in fleet.tracebacks()]
    return Story(faults, load.ledger, complaints, fleet.output)


async def _after(fleet: Fleet) -> list[str]:
    """Faults are over: now every request must be answered."""
    calm = Load(fleet, plain, callers=4)
    try:
        async with calm:
            await calm.answers(AFTER)
    except (TimeoutError, AssertionError) as error:
        return [f"the fleet did not recover: {type(error).__name__}\n{calm.ledger}"]
    wrong = [row for row in calm.ledger.rows if row.verdict != "answered"]
    return [f"after the last fault not all were answered:\n{calm.ledger}"] if wrong else []
