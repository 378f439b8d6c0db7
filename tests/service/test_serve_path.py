"""The whole path with a runtime that computes nothing: HTTP, queue, worker, runtime process."""

from __future__ import annotations

import asyncio
import time

import httpx
import numpy as np
import pytest

from shoal.runtimes.null import numbers
from tests.support.metrics import metric
from tests.support.pace import limit_s
from tests.support.ports import free_port
from tests.support.raw_http import until
from tests.support.shoal_process import Serve

# Each item of the slow model is a batch of its own, however fast it turns out to be.
SLOW_S = limit_s(0.5)
# So long that a deadline that fires is not mistaken for the end of a batch.
LONG_S = limit_s(1.5)
DEADLINE_S = 0.15

MODELS = {
    "echo": "{}",
    "slow": f"{{sleep_s: {SLOW_S:.2f}}}\nprofile: {{max_batch_tokens: 1}}",
    "long": f"{{sleep_s: {LONG_S:.2f}}}",
    "poisoned": "{poison: 'the poison', nan: 'not a number'}",
}


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    metrics_port = free_port()
    server = Serve(
        tmp_path_factory.mktemp("serve"),
        *("--devices", "cpu:2", "--inline-max-bytes", "20000", "--item-inputs", "16"),
        *("--metrics-port", str(metrics_port)),
        models=MODELS,
    )
    server.metrics_port = metrics_port
    yield server
    assert server.leave() == 0, server.output


def dense(serve, texts, model="echo", **headers):
    answer = serve.post("/v1/encode", {"model": model, "inputs": texts}, **headers)
    assert answer.status_code == 200, answer.text
    return np.array(answer.json()["dense"], np.float32)


def test_serve_path_answers_each_input_with_its_own_numbers(serve):
    """A request of many items comes back complete and in the order of its inputs."""
    texts = [f"text number {n}" for n in range(500)]
    np.testing.assert_allclose(dense(serve, texts), numbers(texts, 8), atol=1e-6)


def test_serve_path_large_bodies_and_results_go_through_the_payload_store(serve):
    """Inputs and outputs far over the inline limit arrive intact in both directions."""
    texts = [f"{n} " + "x" * 5000 for n in range(64)]
    np.testing.assert_allclose(dense(serve, texts), numbers(texts, 8), atol=1e-6)
    body = {
        "model": "echo",
        "inputs": [f"s{n}" for n in range(2048)],
        "outputs": ["dense", "sparse"],
    }
    answer = serve.post("/v1/encode", body)
    assert len(answer.json()["sparse"]) == 2048


def test_serve_path_never_crosses_answers_under_load(serve):
    """Three hundred requests, 32 at once, each with its own text: every answer is its own."""

    async def caller(client, first):
        for n in range(first, 300, 32):
            answer = await client.post(
                "/v1/encode", json={"model": "echo", "inputs": f"unique {n}"}
            )
            assert answer.status_code == 200, answer.text
            expected = numbers([f"unique {n}"], 8)
            np.testing.assert_allclose(answer.json()["dense"], expected, atol=1e-6)

    async def main():
        limits = httpx.Limits(max_connections=32)
        async with httpx.AsyncClient(
            base_url=serve.url, limits=limits, timeout=limit_s(60)
        ) as client:
            await asyncio.gather(*(caller(client, first) for first in range(32)))

    asyncio.run(main())


def test_serve_path_score_and_rerank_agree(serve):
    """Rerank orders the documents by the scores that /v1/score gives in input order."""
    body = {"model": "echo", "query": "q", "documents": [f"doc {n}" for n in range(40)]}
    scores = serve.post("/v1/score", body).json()["scores"]
    ranked = serve.post("/v1/rerank", body | {"top_n": 5}).json()["results"]
    assert [r["index"] for r in ranked] == list(np.argsort([-s for s in scores], kind="stable")[:5])


def test_serve_path_poisoned_input_fails_alone(serve):
    """Requests that share a batch with one that breaks the runtime are served."""

    async def main():
        async with httpx.AsyncClient(base_url=serve.url, timeout=limit_s(60)) as client:

            def post(text):
                return client.post("/v1/encode", json={"model": "poisoned", "inputs": text})

            texts = ["a", "the poison", "b", "not a number", "c"]
            return await asyncio.gather(*(post(text) for text in texts * 10))

    answers = asyncio.run(main())
    assert [a.status_code for a in answers] == [200, 500, 200, 500, 200] * 10
    assert answers[1].json()["code"] == "run_failed"
    assert "finite" in answers[3].json()["message"]


def worker_metric(serve, name):
    """What the worker says of itself."""
    return metric(f"http://127.0.0.1:{serve.metrics_port}", name)


def items_run(serve, model):
    """How many items of a model the runtime has run, by the worker's own count."""
    return worker_metric(serve, f'shoal_worker_items_total{{model="{model}"}}')


def test_serve_path_deadline_fires_at_the_deadline(serve):
    """The 504 comes at the deadline, while the batch that was to answer still runs."""
    dense(serve, ["warm"], model="long")
    before = items_run(serve, "long")
    begun = time.monotonic()
    headers = {"X-Shoal-Deadline-Ms": f"{DEADLINE_S * 1e3:.0f}"}
    answer = serve.post("/v1/encode", {"model": "long", "inputs": "x"}, **headers)
    took_s = time.monotonic() - begun
    assert items_run(serve, "long") == before
    assert answer.status_code == 504
    assert answer.json()["code"] == "deadline_exceeded"
    assert DEADLINE_S - 0.01 < took_s < LONG_S


def test_serve_path_client_that_leaves_frees_its_queued_work(serve):
    """Work of callers who left never runs: only what ran before the workers were told has run."""

    async def main():
        async with httpx.AsyncClient(base_url=serve.url, timeout=limit_s(60)) as client:

            def post(text):
                return client.post("/v1/encode", json={"model": "slow", "inputs": [text]})

            leaving = [asyncio.create_task(post(f"leaving {n}")) for n in range(60)]
            await asyncio.wait(leaving, return_when=asyncio.FIRST_COMPLETED)
            for task in leaving:
                task.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
            until(lambda: metric(serve.url, "shoal_gateway_waiting_items") == 0)
            ran = items_run(serve, "slow")
            assert (await post("last")).status_code == 200
            return ran

    before = items_run(serve, "slow")
    ran_before_they_left = asyncio.run(main()) - before
    until(lambda: worker_metric(serve, "shoal_worker_held_items") == 0, timeout_s=20)
    # Two devices, each with a batch that ran and one that was staged; and the last caller's. Some
    # more may begin until the worker has heard of it.
    most = ran_before_they_left + 2 * 2 + 1 + 10
    assert items_run(serve, "slow") - before <= most < 60


def test_serve_path_lane_header_reaches_the_bulk_line(serve):
    """Both lanes answer, and an unknown one is named in a 400."""
    dense(serve, ["x"], **{"X-Shoal-Lane": "bulk"})
    answer = serve.post("/v1/encode", {"model": "echo", "inputs": "x"}, **{"X-Shoal-Lane": "fast"})
    assert answer.status_code == 400
    assert "lane" in answer.json()["param"].lower()


def test_serve_path_models_report_their_state(serve):
    """/v1/models says what the fleet holds."""
    dense(serve, ["x"])

    def state():
        models = httpx.get(f"{serve.url}/v1/models").json()["data"]
        return {m["id"]: m["state"] for m in models}["echo"]

    until(lambda: state() == "resident")


def test_serve_path_metrics_count_what_was_served(serve):
    """/metrics counts requests by route and status."""
    dense(serve, ["x"])
    text = httpx.get(f"{serve.url}/metrics").text
    assert "shoal_gateway_live_workers 1.0" in text
    assert 'shoal_gateway_requests_total{route="encode",status="200"}' in text
