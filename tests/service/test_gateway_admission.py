"""Early refusals of a whole `shoal serve`, whose model does a known amount of work a second."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from tests.conftest import until
from tests.support.metrics import metric
from tests.support.pace import limit_s
from tests.support.shoal_process import Serve

# A batch has at most 100 tokens and takes `UNIT_S`: a text of 97 tokens runs alone. All times are
# in these units, so that on a slow machine the rest of a request is as small a part of them.
UNIT_S = limit_s(0.1)
MODEL = (
    f"{{sleep_s: {UNIT_S}}}\nprofile: {{tokens_per_s: {100 / UNIT_S:.1f}, max_batch_tokens: 100}}"
)
TEXT = "four" * 95
BACKLOG = 'shoal_gateway_backlog_seconds{lane="bulk"}'


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    folder = tmp_path_factory.mktemp("admission")
    server = Serve(folder, "--devices", "cpu:1", models={"slow": MODEL})
    for _ in range(2):
        assert server.post("/v1/encode", {"model": "slow", "inputs": TEXT}).status_code == 200
    give_up = time.monotonic() + limit_s(10)
    while metric(server.url, "shoal_gateway_live_devices") != 1.0:
        assert time.monotonic() < give_up
        time.sleep(0.05)
    yield server
    assert server.leave() == 0, server.output


class Caller:
    def __init__(self, client):
        self.client = client

    async def ask(self, inputs, *, lane="bulk", units):
        """The answer, and how many batches could have run meanwhile."""
        headers = {"X-Shoal-Lane": lane, "X-Shoal-Deadline-Ms": f"{units * UNIT_S * 1e3:.0f}"}
        body = {"model": "slow", "inputs": inputs}
        begun = time.monotonic()
        answer = await self.client.post("/v1/encode", json=body, headers=headers)
        return answer, (time.monotonic() - begun) / UNIT_S


async def first_refusal(tasks):
    async with asyncio.timeout(limit_s(5)):
        while True:
            answers = [task.result()[0] for task in tasks if task.done()]
            for answer in answers:
                if answer.status_code == 429:
                    return answer
            await asyncio.sleep(0.01)


def run(server, main):
    async def with_client():
        async with httpx.AsyncClient(base_url=server.url, timeout=limit_s(60)) as client:
            return await main(Caller(client))

    return asyncio.run(with_client())


def test_gateway_admission_refuses_the_part_of_a_burst_that_would_be_late(serve):
    """Sixty batches, due in the time of thirty: what fits is in time, the rest is told at once.

    Interactive requests get through meanwhile, and a refused request does after its Retry-After.
    """

    async def main(caller):
        burst = [asyncio.create_task(caller.ask(f"{n} {TEXT}", units=30)) for n in range(60)]
        refused = await first_refusal(burst)
        for _ in range(2):
            answer, took = await caller.ask("now", lane="interactive", units=20)
            assert answer.status_code == 200, answer.text
            assert took < 10
        later = asyncio.create_task(asyncio.sleep(int(refused.headers["retry-after"])))
        told = await asyncio.gather(*burst)
        await later
        answer, _ = await caller.ask(f"again {TEXT}", units=30)
        assert answer.status_code == 200, answer.text
        return told

    told = run(serve, main)
    statuses = [answer.status_code for answer, _ in told]
    assert set(statuses) == {200, 429}, statuses
    assert 12 <= statuses.count(200) <= 30
    refused = [(answer, took) for answer, took in told if answer.status_code == 429]
    for answer, took in refused:
        assert took < 15  # most of it is the test's own sixty connections
        assert answer.json()["code"] == "overloaded"
        assert "deadline" in answer.json()["message"]
        assert 1 <= int(answer.headers["retry-after"]) <= 60 * UNIT_S + 1
    assert metric(serve.url, 'shoal_gateway_refusals_total{reason="overloaded"}') >= len(refused)


def test_gateway_admission_counts_inputs_and_not_requests(serve):
    """Behind ten batches of work a request of 20 short inputs is admitted and one of 2,000 not."""

    async def main(caller):
        filling = [asyncio.create_task(caller.ask(f"{n} {TEXT}", units=300)) for n in range(10)]
        await until(lambda: metric(serve.url, BACKLOG) > 3 * UNIT_S)
        assert metric(serve.url, 'shoal_gateway_wait_bound_seconds{lane="bulk"}') > 5 * UNIT_S
        many, took = await caller.ask(["one of many short texts"] * 2000, units=50)
        few, _ = await caller.ask(["one of some short texts"] * 20, units=50)
        assert (many.status_code, many.json()["code"]) == (429, "overloaded")
        assert took < 5
        assert few.status_code == 200, few.text
        await asyncio.gather(*filling)

    run(serve, main)
    assert metric(serve.url, BACKLOG) == 0.0


def test_gateway_admission_frees_the_work_of_clients_that_leave(serve):
    """When callers leave, their work soon counts no more, and the next is admitted."""

    async def main(caller):
        leaving = [
            asyncio.create_task(caller.ask([f"{n} {TEXT}"] * 2, units=300)) for n in range(20)
        ]
        await until(lambda: metric(serve.url, BACKLOG) > 25 * UNIT_S)
        refused, _ = await caller.ask(TEXT, units=20)
        assert refused.status_code == 429
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        await until(lambda: metric(serve.url, BACKLOG) == 0.0)
        answer, took = await caller.ask(TEXT, units=20)
        assert answer.status_code == 200
        # The batch that runs, one that was staged, and its own.
        assert took < 10

    run(serve, main)
