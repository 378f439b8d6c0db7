"""A NATS cluster of three nodes with three copies of the queue: one may die, nothing is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.support.fleet import Fleet
from tests.support.load import Load, plain
from tests.support.nats_cluster import TOKEN, NatsCluster
from tests.support.pace import limit_s

pytestmark = pytest.mark.slow

STREAM = "shoal-work-default"


def test_faults_cluster_survives_the_death_of_one_node_after_another(tmp_path):
    """The stream's leader is killed under load, comes back, and then another node is killed.

    Every accepted request is answered; what is refused meanwhile is refused before acceptance.
    """
    cluster = NatsCluster(tmp_path / "nats")
    fleet = None
    try:
        asyncio.run(cluster.ready())
        fleet = Fleet(
            tmp_path / "fleet",
            *("--replicas", "3", "--ack-wait-s", str(limit_s(2))),
            gateways=2,
            workers=2,
            url=cluster.url,
            token=TOKEN,
        )
        asyncio.run(asyncio.wait_for(break_nodes(cluster, fleet), limit_s(90)))
    finally:
        if fleet is not None:
            fleet.close()
        cluster.close()


def patient(n):
    """Nodes take up to ten seconds to elect another leader: the deadline is beyond that."""
    return replace(plain(n), deadline_s=limit_s(40))


async def break_nodes(cluster, fleet):
    load = Load(fleet, patient, retry=True)
    async with load:
        await load.answers(30)
        first = await cluster.leader(STREAM)
        cluster.kill(first)
        await load.answers(60, 40)
        cluster.start(first)
        await cluster.in_sync(STREAM)
        second = (first + 1) % 3
        cluster.kill(second)
        await load.answers(60, 40)
    assert load.ledger.clean, f"{load.ledger}\n{fleet.output}"
    asked = {row.ask.name for row in load.ledger.rows}
    assert asked == {row.ask.name for row in load.ledger.of("answered")}, (
        f"{load.ledger}\n{fleet.output}"
    )
