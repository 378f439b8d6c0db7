"""Both clients against a real server: one suite, run with and without `await`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest

from shoal import AsyncClient, Client
from shoal.client import InputsFailed
from shoal.errors import (
    DeadlineExceeded,
    InputTooLong,
    InvalidRequest,
    QueueFull,
    UnknownModel,
    Unreachable,
)
from tests.support.bad_files import WAV, png_header
from tests.support.gateway_server import gateway_server
from tests.support.local_submits import CATALOG, LABELS, sparse, token_vectors, vector
from tests.support.metrics import metric
from tests.support.pace import limit_s
from tests.support.raw_http import until


@pytest.fixture(scope="module")
def served():
    with gateway_server() as server:
        yield server


class Awaited:
    """The asynchronous client, called like the other one."""

    def __init__(self, url, **options):
        self._runner = asyncio.Runner()
        self._client = AsyncClient(url, **options)

    def __getattr__(self, name):
        method = getattr(self._client, name)
        return lambda *args, **options: self._runner.run(method(*args, **options))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
        self._runner.close()


@pytest.fixture(params=[Client, Awaited], ids=["sync", "async"])
def kind(request):
    return request.param


@pytest.fixture
def client(kind, served):
    with kind(served.url, max_retries=1) as client:
        yield client


def test_client_encode_gives_float32_rows(client, served):
    """Encode gives float32 [n, d] in the order of the texts, and the caller may write to it."""
    texts = [f"text {n}" for n in range(100)]
    dense = client.encode(texts, "dense")
    assert (dense.dtype, dense.shape) == (np.float32, (100, 8))
    assert np.array_equal(dense, np.stack([vector(text) for text in texts]))
    dense *= 2
    assert client.encode("one", "dense").shape == (1, 8)


def test_client_encode_passes_its_arguments(client, served):
    """Prompt, dimensions, truncation, lane and deadline reach the job."""
    dense = client.encode(
        ["a"], "org/Dense-Model", prompt="query", dimensions=4, truncate=True, lane="bulk"
    )
    assert np.array_equal(dense[0], vector("query: a", 4))
    job = served.submits.jobs[-1]
    assert (job.lane, job.params.truncate) == ("bulk", True)


def test_client_encode_takes_token_ids(client, served):
    """Lists of token ids are sent as they are."""
    assert client.encode([[1, 2], [3]], "dense").shape == (2, 8)
    assert served.submits.jobs[-1].inputs.ids == [[1, 2], [3]]


def test_client_encode_sparse_and_both(client):
    """Sparse vectors come with uint32 indices and float32 values, alone or beside dense ones."""
    for vectors in (
        client.encode_sparse(["a b", "c"], "sparse"),
        client.encode_outputs(["a b", "c"], "org/both").sparse,
    ):
        for one, text in zip(vectors, ["a b", "c"], strict=True):
            assert (one.indices.dtype, one.values.dtype) == (np.uint32, np.float32)
            assert np.array_equal(one.indices, sparse(text)[0])
            assert np.array_equal(one.values, sparse(text)[1])
    both = client.encode_outputs("c", "org/both")
    assert (both.dense.shape, both.tokens, both.model) == ((1, 8), 3, "org/both")


def test_client_score_and_rerank(client):
    """Score keeps the order of the texts, rerank has the best first with its document."""
    documents = ["a", "b", "c"]
    assert client.score("q", documents, "dense").shape == (3,)
    ranked = client.rerank("q", documents, "dense", top_n=2)
    assert len(ranked) == 2
    assert all(one.document == documents[one.index] for one in ranked)


def test_client_classify(client):
    """Classify gives the best label and all of them, for texts and for pairs."""
    (one,) = client.classify(["x"], "colours")
    assert one.score == max(one.scores.values()) == one.scores[one.label]
    assert set(one.scores) == set(LABELS)
    assert len(client.classify([("a", "b"), ("c", "d")], "pairs")) == 2


def test_client_takes_files_as_bytes_and_paths(client, tmp_path):
    """Bytes and paths are files, in every method that takes them; a string is a text."""
    picture = png_header(3, 4)
    path = tmp_path / "a.png"
    path.write_bytes(picture)
    dense = client.encode([path, picture + b"2"], "pictures")
    assert np.array_equal(dense, np.stack([vector(picture), vector(picture + b"2")]))
    (one,) = client.classify(path, "files", top_k=1)
    assert list(one.scores) == [one.label]
    (page,) = client.extract(b"%PDF-1.7", "pages", outputs=["text", "layout"])
    assert page.text == page.pages[0].lines[0].text
    assert len(page.pages[0].regions) == 1
    with pytest.raises(InvalidRequest, match="not text"):
        client.encode("a.png", "pictures")


def test_client_extracts_and_transcribes(client, served):
    """Entities with their texts, speech with its times, and a transcript with its language."""
    text = "🐟 Ada Lovelace"
    (found,) = client.extract(text, "names", labels=["odd", "even"], threshold=0.0)
    assert [text[e.start : e.end] for e in found.entities] == [found.entities[0].text]
    assert served.submits.jobs[-1].params.labels == ["odd", "even"]
    (speech,) = client.extract([WAV], "sounds")
    said = client.transcribe(WAV, "sounds", language="de")
    assert (said.language, said.duration_s) == ("de", speech.duration_s)
    assert said.segments[0].text == said.text
    assert said.segments[0].end_s == speech.segments[0].end_s


def test_client_gives_token_vectors_and_other_dtypes(client):
    """encode_outputs has the vectors of tokens; int8 stays int8; labels may be judged singly."""
    both = client.encode_outputs(["a b", "c"], "tokens", ["multivector"])
    assert [block.shape for block in both.multivector] == [(2, 8), (1, 8)]
    assert np.array_equal(both.multivector[0], token_vectors("a b"))
    assert client.encode("a", "dense", dtype="int8").dtype == np.int8
    (one,) = client.classify("x", "colours", multi_label=True, threshold=0.0)
    assert set(one.labels) == set(LABELS)


def test_client_tells_which_inputs_failed_and_keeps_the_others(client):
    """Where a part of a call fails, the error has each one's own error, and what went well."""
    good, broken = png_header(1, 1), png_header(1, 1) + b"broken"
    with pytest.raises(InputsFailed, match=r"2 of 4 inputs failed; inputs\[1\]") as failed:
        client.encode([good, broken, b"", good], "pictures")
    assert failed.value.indices == [0, 3]
    assert np.array_equal(failed.value.results, np.stack([vector(good)] * 2))
    assert {at: type(error) for at, error in failed.value.errors.items()} == {
        1: InvalidRequest,
        2: InvalidRequest,
    }
    texts = ["a", "w " * 600]
    with pytest.raises(InputsFailed) as failed:
        client.extract(texts, "names")
    assert isinstance(failed.value.errors[1], InputTooLong)
    assert len(failed.value.results) == 1
    with pytest.raises(InputsFailed) as failed:
        client.encode_outputs(texts, "org/both")
    assert len(failed.value.results.dense) == len(failed.value.results.sparse) == 1
    with pytest.raises(InputsFailed):
        client.classify(texts, "colours")
    with pytest.raises(InputTooLong):
        client.classify(texts[1:], "colours")


def test_client_models(client):
    """Models and model say what there is, by every name."""
    assert [m.id for m in client.models()] == [entry.id for entry in CATALOG.entries]
    assert (client.model("pages").inputs, client.model("dense").memory_bytes) == (
        ["document"],
        1000,
    )
    assert client.model("org/both@2").outputs == {"dense": 8, "sparse": 1000}
    with pytest.raises(UnknownModel):
        client.model("nope")


def test_client_ready(client, served):
    """Ready follows /readyz, without a retry."""
    assert client.ready() is True
    served.submits.not_ready = "no"
    assert client.ready() is False
    served.submits.not_ready = None


def test_client_raises_the_errors_of_the_server(client):
    """An error of the server arrives as its class, with the field and the request id."""
    with pytest.raises(InputTooLong) as long:
        client.encode(["w " * 70], "dense")
    assert long.value.param == "inputs[0]"
    assert long.value.__notes__[0].startswith("request id: ")


def test_client_tries_again_when_told_to(client, served):
    """A full queue is tried once more after Retry-After, and then raised."""
    before = len(served.submits.jobs)
    started = time.monotonic()
    with pytest.raises(QueueFull):
        client.encode("fail:queue_full", "dense")
    assert time.monotonic() - started >= 1
    assert [j.inputs.texts[0] for j in served.submits.jobs[-2:]] == ["fail:queue_full"] * 2
    assert before <= len(served.submits.jobs)


def test_client_is_told_of_an_absent_server(kind):
    """No server at the address is `Unreachable`."""
    with kind("http://127.0.0.1:9", max_retries=0) as client, pytest.raises(Unreachable):
        client.ready()


def test_client_refuses_an_unknown_option(client):
    """A mistyped option is an error, not a silent default."""
    with pytest.raises(TypeError, match="timeout"):
        client.encode("a", "dense", timeout=3)


def test_client_leaves_after_its_time(client, served):
    """The timeout ends a call whose answer does not come, and its job is withdrawn."""
    with pytest.raises(DeadlineExceeded):
        client.encode("hold", "dense", timeout_s=limit_s(0.5))
    name = served.submits.jobs[-1].request_id
    until(lambda: name in served.submits.cancelled)


def test_client_never_crosses_answers(served):
    """One client shared by threads, and one by tasks: every answer is its own."""
    wrong = []
    with Client(served.url) as client:

        def work(name):
            for n in range(20):
                text = f"{name}-{n}"
                if not np.array_equal(client.encode(text, "dense")[0], vector(text)):
                    wrong.append(text)

        threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    async def main():
        async with AsyncClient(served.url) as client:
            texts = [f"task {n}" for n in range(300)]
            rows = await asyncio.gather(*(client.encode(text, "dense") for text in texts))
            return [t for t, r in zip(texts, rows, strict=True) if not (r[0] == vector(t)).all()]

    assert wrong + asyncio.run(main()) == []


def test_client_survives_cancelled_calls(served):
    """Tasks that are cancelled in the middle of an answer leave no dead connection behind."""

    async def main():
        async with AsyncClient(served.url) as client:
            open_ = partial(metric, served.url, "shoal_gateway_open_requests")
            for _ in range(3):
                tasks = [asyncio.create_task(client.encode("hold", "dense")) for _ in range(20)]
                # Those that hold, and the one that asks for this number.
                await asyncio.to_thread(until, lambda: open_() >= 21)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                assert (await client.encode("a", "dense", timeout_s=limit_s(5))).shape == (1, 8)

    asyncio.run(main())


def test_client_methods_are_the_same_on_both():
    """Both clients have every public method of the core, with its documentation."""
    names = {name for name in vars(Client) if not name.startswith("_")}
    assert names == {name for name in vars(AsyncClient) if not name.startswith("_")}
    assert all(getattr(Client, name).__doc__ for name in names)


def test_client_import_is_light():
    """Importing shoal loads no HTTP library, no numpy and no server."""
    code = (
        "import sys, shoal; "
        "print([m for m in ('numpy', 'httpx', 'uvicorn', 'nats') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
