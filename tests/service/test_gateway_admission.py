"""Early refusals of a whole `shoal serve`, whose model does a known amount of work a second."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from tests.support.shoal_process import Serve

# A batch has at most 100 tokens and takes 0.1 s: a text of 97 tokens runs alone.
MODEL = "{sleep_s: 0.1}\nprofile: {tokens_per_s: 1000, max_batch_tokens: 100}"
TEXT = "four" * 95


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    folder = tmp_path_factory.mktemp("admission")
    server = Serve(folder, "--devices", "cpu:1", models={"slow": MODEL})
    for _ in range(2):
        assert server.post("/v1/encode", {"model": "slow", "inputs": TEXT}).status_code == 200
    give_up = time.monotonic() + 10
    while "shoal_gateway_live_devices 1.0" not in metrics(server):
        assert time.monotonic() < give_up
        time.sleep(0.05)
    yield server
    assert server.leave() == 0, server.output


def metrics(server):
    return httpx.get(f"{server.url}/metrics").text


def metric(server, name):
    line = next(line for line in metrics(server).splitlines() if line.startswith(f"{name} "))
    return float(line.split()[-1])


class Caller:
    def __init__(self, client):
        self.client = client

    async def ask(self, inputs, *, lane="bulk", time_s):
        """The answer, and the seconds that it took."""
        headers = {"X-Shoal-Lane": lane, "X-Shoal-Deadline-Ms": f"{time_s * 1e3:.0f}"}
        body = {"model": "slow", "inputs": inputs}
        begun = time.monotonic()
        answer = await self.client.post("/v1/encode", json=body, headers=headers)
        return answer, time.monotonic() - begun


async def first_refusal(tasks):
    async with asyncio.timeout(5):
        while True:
            answers = [task.result()[0] for task in tasks if task.done()]
            for answer in answers:
                if answer.status_code == 429:
                    return answer
            await asyncio.sleep(0.01)


def run(server, main):
    async def with_client():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            return await main(Caller(client))

    return asyncio.run(with_client())


def test_gateway_admission_refuses_the_part_of_a_burst_that_would_be_late(serve):
    """Six seconds of work, due in three: what fits is answered in time, the rest is told at once.

    Interactive requests get through meanwhile, and a refused request does after its Retry-After.
    """

    async def main(caller):
        burst = [asyncio.create_task(caller.ask(f"{n} {TEXT}", time_s=3.0)) for n in range(60)]
        refused = await first_refusal(burst)
        for _ in range(2):
            answer, took_s = await caller.ask("now", lane="interactive", time_s=2.0)
            assert answer.status_code == 200, answer.text
            assert took_s < 1.0
        later = asyncio.create_task(asyncio.sleep(int(refused.headers["retry-after"])))
        told = await asyncio.gather(*burst)
        await later
        answer, _ = await caller.ask(f"again {TEXT}", time_s=3.0)
        assert answer.status_code == 200, answer.text
        return told

    told = run(serve, main)
    statuses = [answer.status_code for answer, _ in told]
    assert set(statuses) == {200, 429}, statuses
    assert 12 <= statuses.count(200) <= 30
    refused = [(answer, took_s) for answer, took_s in told if answer.status_code == 429]
    for answer, took_s in refused:
        assert took_s < 1.5  # most of it is the test's own sixty connections
        assert answer.json()["code"] == "overloaded"
        assert "deadline" in answer.json()["message"]
        assert 1 <= int(answer.headers["retry-after"]) <= 6
    assert metric(serve, 'shoal_gateway_refusals_total{reason="overloaded"}') >= len(refused)


def test_gateway_admission_counts_inputs_and_not_requests(serve):
    """Behind one second of work a request of 20 short inputs is admitted and one of 2,000 not."""

    async def main(caller):
        filling = [asyncio.create_task(caller.ask(f"{n} {TEXT}", time_s=30)) for n in range(10)]
        await asyncio.sleep(0.1)
        assert metric(serve, 'shoal_gateway_backlog_seconds{lane="bulk"}') > 0.3
        assert metric(serve, 'shoal_gateway_wait_bound_seconds{lane="bulk"}') > 1.0
        many, took_s = await caller.ask(["one of many short texts"] * 2000, time_s=5.0)
        few, _ = await caller.ask(["one of some short texts"] * 20, time_s=5.0)
        assert (many.status_code, many.json()["code"]) == (429, "overloaded")
        assert took_s < 0.5
        assert few.status_code == 200, few.text
        await asyncio.gather(*filling)

    run(serve, main)
    assert metric(serve, 'shoal_gateway_backlog_seconds{lane="bulk"}') == 0.0


def test_gateway_admission_frees_the_work_of_clients_that_leave(serve):
    """When callers leave, their work counts no more within 100 ms, and the next is admitted."""

    async def main(caller):
        leaving = [
            asyncio.create_task(caller.ask([f"{n} {TEXT}"] * 2, time_s=30)) for n in range(20)
        ]
        await asyncio.sleep(0.3)
        refused, _ = await caller.ask(TEXT, time_s=2.0)
        assert refused.status_code == 429
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        await asyncio.sleep(0.1)
        assert metric(serve, 'shoal_gateway_backlog_seconds{lane="bulk"}') == 0.0
        answer, took_s = await caller.ask(TEXT, time_s=2.0)
        assert answer.status_code == 200
        # The batch that runs, one that was staged, and its own.
        assert took_s < 1.0

    run(serve, main)
