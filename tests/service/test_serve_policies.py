"""Every policy serves through the whole system; lanes and deadlines do what they say there."""

from __future__ import annotations

import asyncio
import time

import httpx
import numpy as np
import pytest

from shoal.runtimes.null import numbers
from tests.support.shoal_process import Serve


@pytest.mark.parametrize("policy", ["fair", "oldest", "fifo32", "window64", "buckets"])
def test_serve_policy_answers_everything_rightly(tmp_path, policy):
    """Whatever chooses the batches, each text gets its own numbers."""
    server = Serve(tmp_path, "--policy", policy, "--devices", "cpu:1", models={"echo": "{}"})
    texts = [f"text {n} " + "x " * (n % 50) for n in range(300)]

    async def main():
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:

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
    """Behind a minute of bulk work an interactive request waits for one quantum's batch."""
    models = {"slow": "{sleep_s: 0.2}"}
    server = Serve(tmp_path, "--devices", "cpu:1", models=models)

    async def main():
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

            async def ask(text, lane):
                headers = {"X-Shoal-Lane": lane, "X-Shoal-Deadline-Ms": "110000"}
                body = {"model": "slow", "inputs": text}
                begun = time.monotonic()
                answer = await client.post("/v1/encode", json=body, headers=headers)
                return answer.status_code, time.monotonic() - begun

            assert (await ask("warm", "interactive"))[0] == 200
            # Each runs alone, for it is longer than a quantum by the profile's guess.
            bulk = [asyncio.create_task(ask(f"{n} " + "long " * 3000, "bulk")) for n in range(60)]
            await asyncio.sleep(0.5)
            waits = []
            for n in range(5):
                status, took_s = await ask(f"short {n}", "interactive")
                assert status == 200
                waits.append(took_s)
            assert not all(task.done() for task in bulk)
            for task in bulk:
                task.cancel()
            await asyncio.gather(*bulk, return_exceptions=True)
            return waits

    try:
        # The batch that runs, one that was staged, and its own: 0.2 s each.
        assert max(asyncio.run(main())) < 1.2
    finally:
        server.leave()
