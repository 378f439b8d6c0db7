"""Good and bad texts in one request, through the whole server on real weights."""

from __future__ import annotations

from pathlib import Path

import pytest

import shoal
from tests.support.shoal_process import Serve

MINILM = Path(shoal.__file__).parent / "catalog/data/models/all-minilm-l6-v2.yaml"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """MiniLM as in the demo, and an entry that promises more tokens than its network takes."""
    folder = tmp_path_factory.mktemp("demo")
    catalog = folder / "catalog"
    catalog.mkdir()
    plain = MINILM.read_text()
    (catalog / "plain.yaml").write_text(plain)
    lines = [line for line in plain.splitlines() if not line.startswith(("id:", "aliases:", "max"))]
    (catalog / "wide.yaml").write_text("\n".join(["id: wide", "max_tokens: 520", *lines]))
    serve = Serve(folder, "--devices", "cpu:1", "--catalog", str(catalog))
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


def test_partial_fails_alone_what_only_the_runtime_refuses(demo):
    """Refused while preparing, or by the network: each error is in its place."""
    texts = ["one", "word " * 540, "two", "word " * 511, "three", "word " * 511]
    mixed = demo.post("/v1/encode", {"model": "wide", "inputs": texts}).json()
    alone = demo.post("/v1/encode", {"model": "wide", "inputs": texts[:5:2]}).json()
    assert [i for i, vector in enumerate(mixed["dense"]) if vector is not None] == [0, 2, 4]
    for vector, expected in zip(mixed["dense"][::2], alone["dense"], strict=True):
        assert vector == pytest.approx(expected, abs=1e-5)
    assert [(e["index"], e["code"], e["param"]) for e in mixed["errors"]] == [
        (i, "input_too_long", f"inputs[{i}]") for i in (1, 3, 5)
    ]
    for error, most in zip(mixed["errors"], (520, 512, 512), strict=True):
        assert f"model takes {most}" in error["message"]


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
