"""SIGTERM: each process finishes or gives back what it holds; rolling restarts lose nothing."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import suppress

import pytest

from tests.conftest import until
from tests.support.connection import Connection, Severed
from tests.support.fleet import Fleet
from tests.support.ledger import Ask, judge
from tests.support.load import Load
from tests.support.metrics import metric
from tests.support.pace import limit_s

pytestmark = pytest.mark.slow


# An item that a leaving worker did not give back would wait a whole ack_wait: seen as 504.
FLAGS = ("--ack-wait-s", str(limit_s(30)))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), *FLAGS, gateways=2, workers=2)
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def hurried(tmp_path_factory):
    """A gateway and a worker that have less time to leave than their work takes."""
    fleet = Fleet(
        tmp_path_factory.mktemp("hurried"),
        *FLAGS,
        models={"sleepy": f"{{sleep_s: {limit_s(3)}}}", "dozy": "{sleep_s: 0.7}"},
        worker_flags=("--drain-s", "0.1"),
        shutdown_s=1.0,
    )
    yield fleet
    fleet.close()


def mixed(n):
    """Quick requests, and every eighth takes a while."""
    return Ask(f"drain-{n}", "slow" if n % 8 == 7 else "echo", [f"drain {n}"], limit_s(8))


def test_faults_drain_rolling_restart_loses_nothing(fleet):
    """Two workers and two gateways are restarted one by one, and every request is answered.

    A client that tries the other gateway, when one refuses or no longer listens, sees no failure.
    """

    async def main():
        load = Load(fleet, mixed, retry=True)
        async with load:
            for i in (0, 1):
                await load.answers(20)
                assert await asyncio.to_thread(fleet.end_worker, i, signal.SIGTERM) == 0
                await load.answers(20)
                await asyncio.to_thread(fleet.start_worker, i)
                await load.answers(20)
                assert await asyncio.to_thread(fleet.end_gateway, i, signal.SIGTERM) == 0
                await load.answers(20)
                await asyncio.to_thread(fleet.start_gateway, i)
            await load.answers(20)
        assert load.ledger.clean, f"{load.ledger}\n{fleet.output}"
        refused = {v for v in load.ledger.counts() if v.startswith("refused")}
        assert load.ledger.counts().keys() - refused <= {"answered", "unreachable", "unread"}, (
            f"{load.ledger}"
        )
        asked = {row.ask.name for row in load.ledger.rows}
        assert asked == {row.ask.name for row in load.ledger.of("answered")}

    asyncio.run(asyncio.wait_for(main(), limit_s(60)))


async def one(fleet, ask, gateway=0):
    connection = await Connection.open(fleet.ports[gateway])
    begun_s = time.monotonic()
    reply = await asyncio.wait_for(
        connection.post("/v1/encode", ask.body, ask.headers), limit_s(10)
    )
    connection.close()
    return *judge(ask, reply, time.monotonic() - begun_s), reply


def test_faults_drain_gateway_stops_accepting_before_it_stops_answering(fleet):
    """A request under way at SIGTERM is answered; a new connection is refused meanwhile."""

    async def main():
        await one(fleet, Ask("warm", "slow", ["warm"], limit_s(8)))
        open_ones = [
            asyncio.create_task(one(fleet, Ask(f"open-{n}", "slow", [f"open {n}"], limit_s(8))))
            for n in range(4)
        ]
        url = f"http://127.0.0.1:{fleet.ports[0]}"
        await until(lambda: metric(url, "shoal_gateway_waiting_items") == 4, 10)
        fleet.gateways[0].process.send_signal(signal.SIGTERM)
        # Refused, reset, or closed before it was read, once it has heard the signal.
        with suppress(ConnectionError, Severed):
            while True:
                await one(fleet, Ask("late", "echo", ["late"], limit_s(8)))
        for verdict, detail, _ in await asyncio.gather(*open_ones):
            assert verdict == "answered", f"{detail}\n{fleet.output}"
        assert await asyncio.to_thread(fleet.end_gateway, 0, signal.SIGTERM) == 0
        await asyncio.to_thread(fleet.start_gateway, 0)

    asyncio.run(main())


def test_faults_drain_gateway_that_must_leave_says_so(hurried):
    """A request that outlasts the time for leaving gets a clear 503, and no bare 500."""
    fleet = hurried
    url = f"http://127.0.0.1:{fleet.ports[0]}"

    async def main():
        sent = asyncio.create_task(one(fleet, Ask("long", "sleepy", ["long"], limit_s(20))))
        await until(lambda: metric(url, "shoal_gateway_waiting_items") == 1, 10)
        assert await asyncio.to_thread(fleet.end_gateway, 0, signal.SIGTERM) == 0
        verdict, detail, reply = await sent
        assert verdict == "failed:shutting_down", detail
        assert reply.headers["retry-after"] == "1"
        assert not fleet.tracebacks()
        await asyncio.to_thread(fleet.start_gateway, 0)

    asyncio.run(asyncio.wait_for(main(), limit_s(40)))


def test_faults_drain_worker_gives_back_what_it_cannot_finish(hurried):
    """With no time to finish, a leaving worker hands its items to its successor at once."""
    fleet = hurried
    url = f"http://127.0.0.1:{fleet.ports[0]}"

    async def main():
        asks = [Ask(f"held-{n}", "dozy", [f"held {n} " * 900], limit_s(20)) for n in range(3)]
        sent = [asyncio.create_task(one(fleet, ask)) for ask in asks]
        await until(lambda: metric(url, "shoal_gateway_waiting_items") == 3, 10)
        begun_s = time.monotonic()
        assert await asyncio.to_thread(fleet.end_worker, 0, signal.SIGTERM) == 0
        assert time.monotonic() - begun_s < limit_s(3)
        await asyncio.to_thread(fleet.start_worker, 0)
        for verdict, detail, _ in await asyncio.gather(*sent):
            assert verdict == "answered", f"{detail}\n{fleet.output}"

    asyncio.run(asyncio.wait_for(main(), limit_s(40)))


def test_faults_drain_broker_that_is_told_to_stop_comes_back_with_all_work(fleet):
    """SIGTERM of the broker under load: what it had taken is answered after its restart."""

    async def main():
        load = Load(fleet, mixed, retry=True)
        async with load:
            await load.answers(20)
            fleet.nats.process.terminate()
            await asyncio.to_thread(fleet.nats.process.wait)
            await asyncio.to_thread(fleet.nats.start)
            await load.answers(40)
        assert load.ledger.clean, f"{load.ledger}\n{fleet.output}"
        assert not load.ledger.of("failed:deadline"), str(load.ledger)

    asyncio.run(asyncio.wait_for(main(), limit_s(60)))
