"""Every policy serves through the whole system; lanes and deadlines do what they say there."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import pytest

from shoal.runtimes.null import numbers
from tests.support.pace import limit_s
from tests.support.shoal_process import NULL_ENTRY, Serve


@pytest.mark.parametrize("policy", ["fair", "oldest", "fifo32", "window64", "buckets"])
def test_serve_policy_answers_everything_rightly(tmp_path, policy):
    """Whatever chooses the batches, each text gets its own numbers."""
    server = Serve(tmp_path, "--policy", policy, "--devices", "cpu:1", models={"echo": "{}"})
    texts = [f"text {n} " + "x " * (n % 50) for n in range(300)]

    async def main():
        async with httpx.AsyncClient(base_url=server.url, timeout=limit_s(30)) as client:

            async def ask(text):
                body = {"model": "echo", "inputs": text}
                answer = await client.post("/v1/encode", json=body)
                return answer.json()["dense"][0]

            return [
                row
                for i in range(0, 300, 50)
                for row in await asyncio.gather(*map(ask, texts[i : i + 50]))
            ]

    try:
        np.testing.assert_allclose(asyncio.run(main()), numbers(texts, 8), atol=1e-6)
    finally:
        assert server.leave() == 0, server.output


def test_serve_policy_interactive_work_does_not_wait_behind_bulk(tmp_path):
    """Behind sixty bulk batches an interactive request waits for no more than a few of them."""
    catalog = tmp_path / "catalog"
    catalog.mkdir()
    # Each item is a batch of its own, however fast the worker learns that the model is.
    entry = NULL_ENTRY.format(id="slow", options="{sleep_s: 0.5}")
    (catalog / "slow.yaml").write_text(f"{entry}profile: {{max_batch_tokens: 1}}\n")
    server = Serve(tmp_path, "--devices", "cpu:1", "--catalog", str(catalog))

    async def main():
        async with httpx.AsyncClient(base_url=server.url, timeout=limit_s(120)) as client:

            async def ask(text, lane):
                headers = {"X-Shoal-Lane": lane, "X-Shoal-Deadline-Ms": "110000"}
                body = {"model": "slow", "inputs": text}
                answer = await client.post("/v1/encode", json=body, headers=headers)
                assert answer.status_code == 200, answer.text

            await ask("warm", "interactive")
            bulk = [asyncio.create_task(ask(f"bulk {n}", "bulk")) for n in range(60)]
            await asyncio.wait(bulk, return_when=asyncio.FIRST_COMPLETED)
            for n in range(5):
                await ask(f"short {n}", "interactive")
            served = sum(task.done() for task in bulk)
            for task in bulk:
                task.cancel()
            await asyncio.gather(*bulk, return_exceptions=True)
            return served

    try:
        # For each: the batch that runs, one that was staged, and what comes while it is answered.
        assert asyncio.run(main()) <= 20
    finally:
        server.leave()
