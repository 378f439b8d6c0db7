"""Real models through the whole path: numbers over HTTP agree with the reference library."""

from __future__ import annotations

import httpx
import numpy as np
import pytest

from shoal.catalog.load import load
from shoal.catalog.resolve import resolve_source
from tests.support.lazy import Lazy
from tests.support.pace import limit_s

openai = Lazy("openai")
sentence_transformers = Lazy("sentence_transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CATALOG = load(None)
TEXTS = [
    "hello",
    "A shoal is a group of fish that swim together.",
    "The mean time to recover was four minutes.",
    "word " * 126,
    "word " * 127,
    "word " * 254,
]


@pytest.fixture(scope="module")
def reference():
    made = {}

    def of(model: str) -> sentence_transformers.SentenceTransformer:
        if model not in made:
            entry = CATALOG.resolve(model)
            path = str(resolve_source(entry.source, None))
            made[model] = sentence_transformers.SentenceTransformer(
                path, device="cpu", local_files_only=True
            )
            made[model].max_seq_length = entry.max_tokens
        return made[model]

    return of


def cosines(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def embed(url, model, texts, **more):
    body = {"model": model, "input": texts, **more}
    answer = httpx.post(f"{url}/v1/embeddings", json=body, timeout=limit_s(120))
    assert answer.status_code == 200, answer.text
    return [row["embedding"] for row in answer.json()["data"]]


@pytest.mark.parametrize("model", ["all-minilm-l6-v2", "all-minilm-l6-v2-torch", "sre-minilm"])
def test_serve_models_agree_with_the_reference(live_server, reference, model):
    """Solo and in one mixed request, every vector is the reference's, cosine >= 0.9999."""
    expected = reference(model).encode(TEXTS, normalize_embeddings=True)
    together = embed(live_server, model, TEXTS)
    alone = [embed(live_server, model, text)[0] for text in TEXTS]
    assert cosines(together, expected).min() >= 0.9999
    assert cosines(alone, expected).min() >= 0.9999


def test_serve_models_int8_is_near_the_float_model(live_server):
    """The int8 tier is what it says: close to the float32 vectors, not equal."""
    float32 = embed(live_server, "all-minilm-l6-v2", TEXTS)
    int8 = embed(live_server, "all-minilm-l6-v2-int8", TEXTS)
    assert 0.95 < cosines(float32, int8).mean() < 0.99999


def test_serve_models_over_long_input_is_refused_or_cut(live_server):
    """257 tokens are a 400 that names the input, alone and in a list, and cut with truncate."""
    long = "word " * 255
    for texts, param in ((long, "input"), (["short", long], "input[1]")):
        body = {"model": "all-minilm-l6-v2", "input": texts}
        answer = httpx.post(f"{live_server}/v1/embeddings", json=body, timeout=limit_s(60))
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "input_too_long"
        assert answer.json()["error"]["param"] == param
    cut = embed(live_server, "all-minilm-l6-v2", [long, "word " * 254], truncate=True)
    assert cosines(cut[:1], cut[1:]).min() >= 0.9999


def test_serve_models_token_ids_equal_their_text(live_server):
    """Ids that the caller made, special tokens included, give the vector of the text."""
    ids = [101, 7592, 102]  # [CLS] hello [SEP]
    pairs = embed(live_server, "all-minilm-l6-v2", [ids]), embed(live_server, "minilm", "hello")
    assert cosines(*pairs).min() >= 0.99999
    body = {"model": "minilm", "input": [[101, 999_999, 102]]}
    answer = httpx.post(f"{live_server}/v1/embeddings", json=body, timeout=limit_s(60))
    assert answer.status_code == 400
    assert "999999" in answer.json()["error"]["message"]


def test_serve_models_rerank_finds_the_relevant_text(live_server):
    """The pair head and embedding similarity both put the answer before what is beside it."""
    documents = ["Bananas are yellow.", "Paris is the capital of France.", "It rained all day."]
    for model in ("all-minilm-l6-v2", "splade-tiny"):
        body = {"model": model, "query": "What is the capital of France?", "documents": documents}
        answer = httpx.post(f"{live_server}/v1/rerank", json=body, timeout=limit_s(60))
        assert answer.status_code == 200, answer.text
        assert answer.json()["results"][0]["index"] == 1


def test_serve_models_sparse_terms_are_sensible(live_server):
    """The sparse model weighs a word of the text above the rest of its vocabulary."""
    body = {"model": "splade-tiny", "inputs": "fish", "outputs": ["sparse"]}
    answer = httpx.post(f"{live_server}/v1/encode", json=body, timeout=limit_s(60))
    assert answer.status_code == 200, answer.text
    sparse = answer.json()["sparse"][0]
    assert sparse["indices"][int(np.argmax(sparse["values"]))] == 3869  # "fish"
    assert 0 < len(sparse["indices"]) < 3000


def test_serve_models_classify_tells_relevant_from_irrelevant(live_server):
    """The relevance head labels a pair that belongs together and one that does not."""
    pairs = [
        ["Paris is the capital of France.", "The capital of France is Paris."],
        ["Paris is the capital of France.", "Bananas are yellow."],
    ]
    body = {"model": "splade-tiny", "inputs": pairs}
    answer = httpx.post(f"{live_server}/v1/classify", json=body, timeout=limit_s(60))
    assert answer.status_code == 200, answer.text
    assert [r["label"] for r in answer.json()["results"]] == ["relevant", "irrelevant"]


def test_serve_models_openai_client_works_unchanged(live_server, reference):
    """The official client embeds (base64 by default, and floats), lists and retrieves models."""
    client = openai.OpenAI(base_url=f"{live_server}/v1", api_key="none", max_retries=0)
    expected = reference("all-minilm-l6-v2").encode(TEXTS[:3], normalize_embeddings=True)
    for form in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        made = client.embeddings.create(model="all-minilm-l6-v2", input=TEXTS[:3], **form)
        rows = [row.embedding for row in made.data]
        if isinstance(rows[0], str):  # the client decodes only what it asked for by itself
            import base64

            rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in rows]
        assert cosines(rows, expected).min() >= 0.9999
        assert made.usage.prompt_tokens > 0
    short = client.embeddings.create(model="minilm", input="hello", dimensions=64)
    assert len(short.data[0].embedding) == 64
    assert np.linalg.norm(short.data[0].embedding) == pytest.approx(1.0, abs=1e-3)
    assert {m.id for m in client.models.list()} == {e.id for e in CATALOG.entries}
    assert client.models.retrieve("minilm").id == "all-minilm-l6-v2"
    with pytest.raises(openai.NotFoundError, match="all-minilm-l6-v2"):
        client.embeddings.create(model="all-minilm-l6", input="x")
    client.close()
