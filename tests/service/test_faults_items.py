"""Single faults of items: the culprit is isolated and told; its neighbours are served."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.support.pace import limit_s
from tests.support.shoal_process import Serve

pytestmark = pytest.mark.slow

MODELS = {
    "frail": "{poison: 'the poison', crash: 'the crash', oom: 'the oom', nan: 'not a number'}",
}
N = 12


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    flags = ("--devices", "cpu:1", "--ack-wait-s", str(limit_s(2)))
    server = Serve(tmp_path_factory.mktemp("faults"), *flags, models=MODELS)
    yield server
    assert server.leave() == 0, server.output


async def beside_neighbours(serve, bad):
    """The answer to a bad text that is sent among good ones, and the good ones' answers."""
    async with httpx.AsyncClient(base_url=serve.url, timeout=limit_s(60)) as client:

        def post(text):
            return client.post("/v1/encode", json={"model": "frail", "inputs": text})

        texts = [f"good {n}" for n in range(N)]
        answers = await asyncio.gather(
            *(post(t) for t in [*texts[: N // 2], bad, *texts[N // 2 :]])
        )
        return answers.pop(N // 2), answers


@pytest.mark.parametrize(
    ("bad", "status", "code"),
    [
        ("the poison", 500, "run_failed"),
        ("not a number", 500, "run_failed"),
        ("the oom", 503, "out_of_memory"),
        ("the crash", 503, "runtime_crashed"),
    ],
)
def test_fault_of_an_item_is_its_own(serve, bad, status, code):
    """The culprit gets its error; every neighbour in its batch is served, after a crash too."""
    answer, good = asyncio.run(beside_neighbours(serve, bad))
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert [a.status_code for a in good] == [200] * N, [a.text for a in good]


def test_fault_in_one_request_of_many_inputs_names_it(serve):
    """A poisoned input among good ones fails with its item, or, on an OpenAI route, the request."""
    texts = [*(f"text {n}" for n in range(200)), "the poison"]
    answer = serve.post("/v1/encode", {"model": "frail", "inputs": texts}).json()
    errors = {error["index"]: error["message"] for error in answer["errors"]}
    assert "poison" in errors[200]
    assert len(errors) < 100
    assert [row is None for row in answer["dense"]] == [n in errors for n in range(201)]
    whole = serve.post("/v1/embeddings", {"model": "frail", "input": texts})
    assert whole.status_code == 500
    assert "poison" in whole.json()["error"]["message"]
    assert serve.post("/v1/encode", {"model": "frail", "inputs": "good"}).status_code == 200
