"""Good and bad texts in one request, through the whole server on real weights."""

from __future__ import annotations

import pytest

from tests.support.shoal_process import Serve


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    serve = Serve(tmp_path_factory.mktemp("demo"), "--devices", "cpu:1")
    yield serve
    serve.leave()


def test_partial_answers_the_good_texts_of_a_request(demo):
    """A text that is too long has its error in its place; its neighbours are answered."""
    texts = ["one", "word " * 600, "three"]
    body = {"model": "minilm", "inputs": texts}
    mixed = demo.post("/v1/encode", body).json()
    alone = demo.post("/v1/encode", {"model": "minilm", "inputs": ["one", "three"]}).json()
    assert mixed["dense"][1] is None
    assert [mixed["dense"][0], mixed["dense"][2]] == [
        pytest.approx(vector, abs=1e-5) for vector in alone["dense"]
    ]
    (error,) = mixed["errors"]
    assert (error["index"], error["code"]) == (1, "input_too_long")


def test_partial_refuses_a_request_of_bad_texts_only(demo):
    """Where nothing could be answered it is a 400 that names the first input."""
    answer = demo.post("/v1/encode", {"model": "minilm", "inputs": ["word " * 600] * 3})
    assert answer.status_code == 400
    assert answer.json()["param"] == "inputs[0]"


def test_partial_is_not_for_openai_routes(demo):
    """Their answer has no place for an error: one bad text fails the request, and is named."""
    answer = demo.post("/v1/embeddings", {"model": "minilm", "input": ["one", "word " * 600]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input[1]"
