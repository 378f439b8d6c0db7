"""A catalog that changes under two gateways and a worker, each a process of its own."""

from __future__ import annotations

import asyncio
import signal

import httpx
import msgspec
import pytest
import yaml
from msgspec.structs import replace

from shoal.catalog.change import Record, encode_record, shelf_key
from shoal.catalog.schema import Entry
from shoal.cli.access import read_access
from shoal.clock import monotonic
from shoal.queue.interface import QueueLimits
from shoal.queue.jetstream import JetStreamQueue
from shoal.queue.topology import Topology
from tests.conftest import NatsServer, run
from tests.support.pace import limit_s
from tests.support.shoal_process import NULL_ENTRY, Serve, ShoalProcess

pytestmark = pytest.mark.slow

WITHIN_S = 1.0


def _entry(name):
    return msgspec.convert(yaml.safe_load(NULL_ENTRY.format(id=name, options="{}")), Entry)


async def _beside(address):
    """A queue of another pool: the catalog is that of all."""
    topology = Topology("beside", "file", 1, QueueLimits(), ("interactive",))
    return await JetStreamQueue.open(address, topology, name="test")


class Cluster:
    """Two gateways and a worker on a broker that the test can kill."""

    def __init__(self, folder) -> None:
        self.server = NatsServer(folder / "nats")
        catalog = folder / "catalog"
        catalog.mkdir()
        (catalog / "echo.yaml").write_text(NULL_ENTRY.format(id="echo", options="{}"))
        self.shared = ("--nats-url", self.server.address.url, "--catalog", str(catalog))
        self.processes = [
            self._start("worker", "--devices", "cpu:1", "--cache-dir", str(folder / "cache")),
            *(self._start("gateway", "--port", "0") for _ in range(2)),
        ]
        self.processes[0].wait_for("ready in")
        self.urls = [
            process.wait_for("gateway listens on").split()[-1] for process in self.processes[1:]
        ]

    def _start(self, *arguments) -> ShoalProcess:
        token = self.server.address.token
        return ShoalProcess(*arguments, *self.shared, SHOAL_NATS_TOKEN=token)

    def stop(self) -> None:
        for process in self.processes:
            process.leave(signal.SIGTERM)
        self.server.stop()

    async def open_shelf(self) -> JetStreamQueue:
        return await _beside(self.server.address)


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path)
    yield made
    made.stop()


async def _write(queue, entry):
    await queue.catalog.put(shelf_key(entry.id), encode_record(Record(entry, "command")))


async def _listed(client, url):
    return {model["id"]: model for model in (await client.get(f"{url}/v1/models")).json()["data"]}


async def _encode(client, url, model):
    body = {"model": model, "inputs": ["a text"]}
    return (await client.post(f"{url}/v1/encode", json=body)).status_code


async def _all_list(client, urls, names, within_s=WITHIN_S):
    """Waits until every gateway lists exactly these models."""
    give_up = monotonic() + limit_s(within_s)
    while any([(await _listed(client, url)).keys() != names for url in urls]):
        assert monotonic() < give_up
        await asyncio.sleep(0.02)


def test_catalog_changes_reach_running_gateways(cluster):
    """Gateways list and serve a new model within a second, also after the broker was killed.

    A removed one is a 404 in as short a time, and a bad record changes nothing.
    """

    async def main():
        queue = await cluster.open_shelf()
        async with httpx.AsyncClient(timeout=limit_s(20)) as client:
            await _all_list(client, cluster.urls, {"echo"}, 10)
            await queue.catalog.put("bad", b"no record")
            await _write(queue, _entry("org/new.one"))
            await _all_list(client, cluster.urls, {"echo", "org/new.one"})
            for url in cluster.urls:
                assert await _encode(client, url, "org/new.one") == 200
            await queue.catalog.remove("echo")
            await _all_list(client, cluster.urls, {"org/new.one"})
            assert await _encode(client, cluster.urls[0], "echo") == 404
            cluster.server.stop()
            await asyncio.to_thread(cluster.server.start)
            async with asyncio.timeout(limit_s(10)):
                while not queue.connected:
                    await asyncio.sleep(0.02)
            await _write(queue, _entry("later"))
            # Each comes back to the broker when it next tries.
            await _all_list(client, cluster.urls, {"org/new.one", "later"}, 5)
            for url in cluster.urls:
                assert await _encode(client, url, "later") == 200
        await queue.close()

    run(main(), 60)


def test_catalog_new_revision_rolls_over_without_a_failed_request(cluster):
    """While requests come a model gets new revisions; every request is answered with 200."""

    async def main():
        queue = await cluster.open_shelf()
        statuses = []

        async def ask(client, url, until_s):
            while monotonic() < until_s:
                statuses.append(await _encode(client, url, "echo"))

        async with httpx.AsyncClient(timeout=limit_s(20)) as client:
            await _all_list(client, cluster.urls, {"echo"}, 10)
            until_s = monotonic() + 1.5
            asking = [asyncio.create_task(ask(client, url, until_s)) for url in cluster.urls * 4]
            for revision in ("2", "3", "4"):
                await asyncio.sleep(0.3)
                await _write(queue, replace(_entry("echo"), revision=revision))
            await asyncio.gather(*asking)
            for url in cluster.urls:
                assert await _encode(client, url, "echo@4") == 200
                assert await _encode(client, url, "echo@3") == 404
        await queue.close()
        assert set(statuses) == {200}

    run(main(), 60)


def test_catalog_of_serve_mirrors_its_folder(tmp_path):
    """`shoal serve` starts with what its folder has now, and with what commands wrote before."""

    async def by_command():
        queue = await _beside(read_access(tmp_path / "data"))
        await _write(queue, _entry("mine"))
        await queue.close()

    def listed(url):
        models = httpx.get(f"{url}/v1/models").json()["data"]
        return {model["id"]: model["revision"] for model in models}

    first = Serve(tmp_path, models={"kept": "{}", "gone": "{}"})
    assert listed(first.url) == {"kept": "1", "gone": "1"}
    run(by_command())
    assert first.leave() == 0
    (tmp_path / "catalog" / "gone.yaml").unlink()
    kept = NULL_ENTRY.format(id="kept", options="{}")
    (tmp_path / "catalog" / "kept.yaml").write_text(f"{kept}revision: '2'\n")
    second = Serve(tmp_path, models={"new": "{}"})
    assert listed(second.url) == {"kept": "2", "new": "1", "mine": "1"}
    assert second.leave() == 0
