"""Bodies over the inline limit under load, from callers many of whom do not wait."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.support.fleet import Fleet
from tests.support.ledger import Ask
from tests.support.load import Load
from tests.support.pace import limit_s

pytestmark = pytest.mark.slow


def long_and_short(n):
    """Every other request is so long that its items go through the payload store."""
    words = "long " * 600 if n % 2 else ""
    return Ask(f"p-{n}", "echo", [f"p {n} text {i} {words}" for i in range(12)], limit_s(10))


class Hasty(Load):
    """Callers who leave, in three of four cases, within a few hundredths of a second."""

    async def send(self, connection, ask):
        rng = random.Random(ask.name)
        if rng.random() < 0.25:
            return await super().send(connection, ask)
        answer = asyncio.ensure_future(super().send(connection, ask))
        done, _ = await asyncio.wait([answer], timeout=rng.uniform(0, 0.03))
        if done:
            return answer.result()
        answer.cancel()
        connection.close()
        return None


def test_faults_payloads_cancelled_while_they_are_fetched_harm_nobody(tmp_path):
    """A caller may leave at the very moment when a body arrives: the worker goes on."""
    fleet = Fleet(tmp_path, "--inline-max-bytes", "20000", models={"echo": "{}"})

    async def main():
        load = Hasty(fleet, long_and_short, callers=24)
        async with load:
            await load.answers(200, 60)
        assert load.ledger.clean, f"{load.ledger}\n{fleet.output}"
        assert not load.ledger.of("failed"), str(load.ledger)
        assert fleet.workers[0].process.poll() is None, fleet.output

    try:
        asyncio.run(main())
    finally:
        fleet.close()
