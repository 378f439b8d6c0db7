"""The official `openai` client against the gateway, unchanged."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.gateway_server import gateway_server
from tests.support.lazy import Lazy

openai = Lazy("openai")

MODEL = "dense"
DIM = 8


@pytest.fixture(scope="module")
def base_url():
    with gateway_server() as server:
        yield server.url


@pytest.fixture
def client(base_url):
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_gateway_openai_client_gets_embeddings(client):
    """The client's default (base64) and `float` give the same float32 numbers, in order."""
    texts = ["a small fish", "a large shoal", "a small fish"]
    default = client.embeddings.create(model=MODEL, input=texts)
    floats = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    assert [one.index for one in default.data] == [0, 1, 2]
    vectors = [np.array([one.embedding for one in a.data], np.float32) for a in (default, floats)]
    assert vectors[0].shape == (3, DIM)
    np.testing.assert_array_equal(vectors[0], vectors[1])
    assert np.allclose(vectors[0][0], vectors[0][2], atol=1e-6)
    assert default.model == MODEL
    assert default.usage.prompt_tokens == default.usage.total_tokens > 0


def test_gateway_openai_client_sends_all_four_shapes(client):
    """A text, texts, token ids, and lists of token ids are each answered."""
    for value, n in (("a", 1), (["a", "b"], 2), ([7, 8, 9], 1), ([[7], [8, 9]], 2)):
        assert len(client.embeddings.create(model=MODEL, input=value).data) == n


def test_gateway_openai_client_asks_for_dimensions(client):
    """`dimensions` gives shorter vectors, of length 1 again."""
    answer = client.embeddings.create(model=MODEL, input="a", dimensions=4)
    vector = np.array(answer.data[0].embedding)
    assert vector.shape == (4,)
    assert np.isclose(np.linalg.norm(vector), 1, atol=1e-5)


def test_gateway_openai_client_lists_models(client):
    """models.list and models.retrieve work, also for an id with a slash."""
    models = {model.id: model for model in client.models.list()}
    assert MODEL in models
    assert client.models.retrieve(MODEL) == models[MODEL]
    assert client.models.retrieve("org/both").id == "org/both"


def test_gateway_openai_client_raises_its_own_errors(client):
    """Errors arrive as the client's classes, with code, param and request id."""
    with pytest.raises(openai.NotFoundError) as missing:
        client.embeddings.create(model="dens", input="a")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError) as wrong:
        client.embeddings.create(model=MODEL, input=["a", ""])
    assert wrong.value.param == "input[1]"
    with pytest.raises(openai.RateLimitError):
        client.embeddings.create(model=MODEL, input="fail:queue_full")
