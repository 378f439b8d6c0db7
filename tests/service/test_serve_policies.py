"""Every policy serves through the whole system; lanes do what they say there."""

from __future__ import annotations

import asyncio
import signal

import httpx
import numpy as np
import pytest

from shoal.runtimes.null import numbers
from tests.conftest import NatsServer
from tests.support.pace import limit_s
from tests.support.shoal_process import NULL_ENTRY, ShoalProcess

N_TEXTS = 120
AT_ONCE = 40
# Each item of `slow` is a batch of its own, however fast the worker learns that the model is. It
# takes so long that what a slow machine needs for the rest of a request is a small part of it.
MODELS = {
    "echo": "{}",
    "slow": f"{{sleep_s: {limit_s(0.5):.2f}}}\nprofile: {{max_batch_tokens: 1}}",
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    """A broker and a gateway, and what a worker needs to join them."""
    folder = tmp_path_factory.mktemp("policies")
    for name, options in MODELS.items():
        (folder / f"{name}.yaml").write_text(NULL_ENTRY.format(id=name, options=options))
    nats = NatsServer(folder / "nats")
    flags = ("--nats-url", nats.address.url, "--catalog", str(folder))
    process = ShoalProcess("gateway", *flags, "--port", "0", SHOAL_NATS_TOKEN=nats.address.token)
    try:
        url = process.wait_for("gateway listens on").split()[-1]
        yield url, flags, nats.address.token
        assert process.leave(signal.SIGTERM) == 0, process.output
    finally:
        process.leave(signal.SIGKILL)
        nats.stop()


@pytest.fixture(scope="module")
def served(gateway, request):
    """The address of the gateway, behind which one worker serves by the policy of the test."""
    url, flags, token = gateway
    flags += ("--devices", "cpu:1", "--policy", request.param)
    worker = ShoalProcess("worker", *flags, SHOAL_NATS_TOKEN=token)
    try:
        worker.wait_for("ready in")
        yield url
        assert worker.leave(signal.SIGTERM) == 0, worker.output
    finally:
        worker.leave(signal.SIGKILL)


def run(url, main):
    async def with_client():
        async with httpx.AsyncClient(base_url=url, timeout=limit_s(120)) as client:

            async def ask(model, text, lane="interactive"):
                headers = {"X-Shoal-Lane": lane, "X-Shoal-Deadline-Ms": f"{limit_s(110) * 1e3:.0f}"}
                body = {"model": model, "inputs": text}
                answer = await client.post("/v1/encode", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                return answer.json()["dense"][0]

            return await main(ask)

    return asyncio.run(with_client())


@pytest.mark.parametrize(
    "served", ["fair", "oldest", "fifo32", "window64", "buckets"], indirect=True
)
def test_serve_policy_answers_everything_rightly(served):
    """Whatever chooses the batches, each text gets its own numbers."""
    texts = [f"text {n} " + "x " * (n % 50) for n in range(N_TEXTS)]

    async def main(ask):
        some = asyncio.Semaphore(AT_ONCE)

        async def one(text):
            async with some:
                return await ask("echo", text)

        return await asyncio.gather(*map(one, texts))

    np.testing.assert_allclose(run(served, main), numbers(texts, 8), atol=1e-6)


@pytest.mark.parametrize("served", ["fair"], indirect=True)
def test_serve_policy_interactive_work_does_not_wait_behind_bulk(served):
    """Of sixty bulk batches few run while three interactive requests are answered in turn."""

    async def main(ask):
        await ask("slow", "warm")
        bulk = [asyncio.create_task(ask("slow", f"bulk {n}", "bulk")) for n in range(60)]
        await asyncio.wait(bulk, return_when=asyncio.FIRST_COMPLETED)
        for n in range(3):
            await ask("slow", f"short {n}")
        n_served = sum(task.done() for task in bulk)
        for task in bulk:
            task.cancel()
        await asyncio.gather(*bulk, return_exceptions=True)
        return n_served

    # For each: the batch that runs, one that was staged, and what comes while it is answered. All
    # of them, if it waited behind what had come before it.
    assert run(served, main) <= 30
