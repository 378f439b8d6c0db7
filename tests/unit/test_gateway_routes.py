"""The pure halves of the routes, and the description made from their table."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import openapi_spec_validator
import pytest

from shoal.core.lanes import DEFAULT_LANES, parse_lanes
from shoal.errors import Bug, InvalidRequest
from shoal.gateway import classify, native, openai, rerank
from shoal.gateway.ask import ask
from shoal.gateway.forms import JSON, MSGPACK
from shoal.gateway.jobs import Answer
from shoal.gateway.pages import description
from shoal.gateway.routes import MODELS, PAGES, TASKS
from shoal.gateway.traffic import Traffic
from shoal.settings import GatewaySettings
from shoal.wire.arrays import Array
from shoal.wire.envelope import Result, Timing
from tests.support.local_submits import CATALOG

LANES = parse_lanes(DEFAULT_LANES)


def asked(headers=None, lanes=("interactive", "bulk")):
    return ask(headers or {}, "request-1", CATALOG, GatewaySettings(), lanes)


def answer(labels=(), **arrays):
    blocks = {name: Array.of(np.asarray(a)) for name, a in arrays.items()}
    return Answer(Result(blocks, list(labels)), 9, Timing())


def f32(*values):
    return np.array(values, np.float32)


def test_rerank_orders_by_logits_where_scores_saturate():
    """Scores that are all 1.0 in float32 are ordered by their logits, and ties stay in order."""
    body = rerank.RerankRequest("dense", "q", ["a", "b", "c", "d"])
    job = rerank.rerank_job(body, asked())
    numbers = answer(scores=f32(1, 1, 1, 1), logits=f32(40, 90, 40, 60))
    ranked = rerank.rerank_answer(body, job, numbers, JSON)
    assert [one.index for one in ranked.results] == [1, 3, 0, 2]


def test_rerank_orders_by_scores_without_logits():
    """Similarities have no logits; then the scores order."""
    body = rerank.RerankRequest("dense", "q", ["a", "b", "c"], top_n=2)
    job = rerank.rerank_job(body, asked())
    ranked = rerank.rerank_answer(body, job, answer(scores=f32(-0.5, 0.25, 0.125)), JSON)
    assert [(one.index, one.relevance_score) for one in ranked.results] == [(1, 0.25), (2, 0.125)]


def test_rerank_has_the_shapes_of_cohere_and_jina():
    """One answer has what both kinds of clients read; documents only on request."""
    body = rerank.RerankRequest("dense", "q", ["a", rerank.Document("b")], return_documents=True)
    job = rerank.rerank_job(body, asked())
    made = msgspec.to_builtins(rerank.rerank_answer(body, job, answer(scores=f32(0, 1)), JSON))
    assert made == {
        "id": "request-1",
        "object": "list",
        "model": "dense",
        "results": [
            {"index": 1, "relevance_score": 1.0, "document": {"text": "b"}},
            {"index": 0, "relevance_score": 0.0, "document": {"text": "a"}},
        ],
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
        "meta": {"tokens": {"input_tokens": 9}},
    }
    plain = rerank.RerankRequest("dense", "q", ["a", "b"])
    made = msgspec.to_builtins(rerank.rerank_answer(plain, job, answer(scores=f32(0, 1)), JSON))
    assert made["results"][0] == {"index": 1, "relevance_score": 1.0}


def test_classify_sorts_labels_by_score():
    """Each input has its best label and all labels, best first, with short decimals."""
    body = classify.ClassifyRequest("colours", ["a", "b"])
    job = classify.classify_job(body, asked())
    scores = np.array([[0.1, 0.7, 0.2], [0.4, 0.3, 0.3]], np.float32)
    made = classify.classify_answer(body, job, answer(["x", "y", "z"], scores=scores), JSON)
    assert [one.label for one in made.results] == ["y", "x"]
    assert [(c.label, c.score) for c in made.results[0].scores] == [
        ("y", 0.7),
        ("z", 0.2),
        ("x", 0.1),
    ]


def test_classify_without_labels_is_a_bug():
    """Scores that do not fit the labels are never guessed at."""
    body = classify.ClassifyRequest("colours", ["a"])
    job = classify.classify_job(body, asked())
    with pytest.raises(Bug):
        classify.classify_answer(body, job, answer(["x"], scores=np.ones((1, 3), np.float32)), JSON)


def test_moderations_refuse_a_guard_whose_classes_have_no_names():
    """Where a class is called LABEL_1 nothing says whether it is harm: refused, not flagged."""
    body = classify.ModerationsRequest("x", "guard")
    job = classify.moderations_job(body, asked())
    scores = np.array([[0.9, 0.1]], np.float32)
    with pytest.raises(InvalidRequest, match=r"`LABEL_0`.*`labels`") as refused:
        classify.moderations_answer(body, job, answer(["LABEL_0", "LABEL_1"], scores=scores), JSON)
    assert refused.value.param == "model"
    named = answer(["benign", "malicious"], scores=scores)
    (one,) = classify.moderations_answer(body, job, named, JSON).results
    assert (one.flagged, one.category_scores) == (False, {"malicious": 0.1})


def test_classify_takes_pairs():
    """Pairs become firsts and texts, in order."""
    body = classify.ClassifyRequest("pairs", [("a", "b"), ("c", "d")])
    job = classify.classify_job(body, asked())
    assert (job.inputs.firsts, job.inputs.texts) == (["a", "c"], ["b", "d"])


def test_encode_default_output_is_the_models_first():
    """Without `outputs` a model gives the first kind that its entry lists."""
    assert native.encode_job(native.EncodeRequest("sparse", "x"), asked()).params.outputs == [
        "sparse"
    ]
    assert native.encode_job(native.EncodeRequest("org/both", "x"), asked()).params.outputs == [
        "dense"
    ]


@pytest.mark.parametrize("name", ["dimensions", "normalize"])
@pytest.mark.parametrize(("model", "outputs"), [("sparse", None), ("org/both", ["sparse"])])
def test_encode_refuses_dense_options_without_dense_output(model, outputs, name):
    """`dimensions` and `normalize` without dense vectors are refused, not ignored."""
    body = native.EncodeRequest(model, "x", outputs=outputs, **{name: 1})
    with pytest.raises(InvalidRequest) as refused:
        native.encode_job(body, asked())
    assert refused.value.param == name


def test_embeddings_of_a_sparse_model_name_the_other_route():
    """A model without dense vectors says where its own are."""
    with pytest.raises(InvalidRequest, match="/v1/encode"):
        openai.embeddings_job(openai.EmbeddingsRequest("sparse", "x"), asked())


def test_embeddings_never_take_another_dtype_for_float32():
    """base64 is float32 or nothing: any other array is a bug, not garbage."""
    body = openai.EmbeddingsRequest("dense", "x", encoding_format="base64")
    job = openai.embeddings_job(body, asked())
    with pytest.raises(Bug):
        openai.embeddings_answer(body, job, answer(dense=np.ones((1, 8), np.float16)), JSON)


def test_floats_in_json_read_back_as_the_same_float32():
    """The decimals of an answer are short and lose nothing, at the ends of the range too."""
    rows = np.array([[1 / 3, 1e-38, -3.4e38, 0.1, 16777217, -0.0]], np.float32)
    body = native.EncodeRequest("dense", "x")
    job = native.encode_job(body, asked())
    made = JSON.encode(native.encode_answer(body, job, answer(dense=rows), JSON))
    assert b"0.33333334," in made
    assert np.array_equal(np.array(json.loads(made)["dense"], np.float32), rows)


def test_sparse_rows_are_cut_by_their_counts():
    """Each input has its own indices and values, and one may have none."""
    body = native.EncodeRequest("sparse", ["a", "b", "c"])
    job = native.encode_job(body, asked())
    numbers = answer(
        sparse_counts=np.array([2, 0, 1], np.uint32),
        sparse_indices=np.array([5, 9, 7], np.uint32),
        sparse_values=f32(0.5, 0.25, 2),
    )
    made = json.loads(JSON.encode(native.encode_answer(body, job, numbers, JSON)))
    assert made["sparse"] == [
        {"indices": [5, 9], "values": [0.5, 0.25]},
        {"indices": [], "values": []},
        {"indices": [7], "values": [2.0]},
    ]
    packed = native.encode_answer(body, job, numbers, MSGPACK)
    assert msgspec.msgpack.decode(MSGPACK.encode(packed))["sparse"][2]["indices"] == {
        "dtype": "uint32",
        "shape": [1],
        "data": b"\x07\0\0\0",
    }


def test_models_name_only_the_endpoints_that_serve_them():
    """A model card lists /v1/embeddings only where the model gives dense vectors."""
    served = {e.id: openai.model_card(CATALOG, e.id, {}).endpoints for e in CATALOG.entries}
    assert served["sparse"] == ["/v1/encode"]
    assert served["org/both"] == ["/v1/embeddings", "/v1/encode"]
    assert served["colours"] == ["/v1/classify", "/v1/moderations"]
    assert served["pairs"] == ["/v1/classify"]
    assert served["pictures"] == [
        *("/v1/embeddings", "/v1/encode", "/v1/classify", "/v1/moderations")
    ]
    assert served["sounds"] == ["/v1/audio/transcriptions", "/v1/extract"]


def test_openapi_is_valid_and_complete():
    """The description is valid OpenAPI 3.1 and has every route of the table."""
    document = json.loads(description(LANES))
    openapi_spec_validator.validate(document)
    assert set(document["paths"]) == {route.path for route in (*TASKS, *PAGES)}


def test_api_page_has_every_task_route_and_every_harmless_label():
    """The page that people wrote names each route of the table, and the labels of no harm."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(/v1/[\w/]+)` \|", page, re.MULTILINE))
    assert named == {route.path for route in (*TASKS, MODELS)}
    assert all(f"`{label}`" in page for label in classify.HARMLESS)


def test_openapi_examples_can_be_read():
    """Every example is accepted by the struct that its route decodes."""
    for route in TASKS:
        body = route.reader.read(JSON.encode(dict(route.example)), JSON)
        assert route.reader.read(MSGPACK.encode(body), MSGPACK) == body


def test_openapi_schemas_describe_the_answers():
    """The fields of a real answer are those of its schema."""
    schemas = json.loads(description(LANES))["components"]["schemas"]
    card = msgspec.to_builtins(openai.model_card(CATALOG, "dense", {}))
    assert set(card) == set(schemas["ModelCard"]["properties"])


def test_traffic_buckets_are_cumulative():
    """A time is counted in every bucket that is not below it, and in +Inf."""
    traffic = Traffic()
    for took_s in (0.0005, 0.001, 0.3, 1000.0):
        traffic.add("encode", 200, took_s, 10, 20)
    times = {m.name: m for m in traffic.collect()}["shoal_gateway_request_seconds"]
    buckets = {s.labels["le"]: s.value for s in times.samples if s.name.endswith("_bucket")}
    assert (buckets["0.001"], buckets["0.25"], buckets["0.5"], buckets["+Inf"]) == (2, 2, 3, 4)
    total = next(s.value for s in times.samples if s.name.endswith("_sum"))
    assert math.isclose(total, 1000.3015)


def test_gateway_import_is_light():
    """The gateway loads neither numpy nor a runtime library until an answer needs numpy."""
    code = (
        "import sys, shoal.gateway.app; "
        "print([m for m in ('numpy', 'orjson', 'torch', 'onnxruntime') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_ask_reads_headers_case_and_space():
    """Lane names are read whatever their case and the space around them."""
    assert asked({b"x-shoal-lane": b" Bulk "}).lane == "bulk"
    assert asked({b"x-shoal-tenant": b" Team-7.eu_a "}).tenant == "Team-7.eu_a"
    assert asked({b"traceparent": b"00-x"}).traceparent is None


def test_ask_takes_the_configured_lanes_and_no_others():
    """The first lane is the default; another deployment's lanes are a 400 that lists ours."""
    lanes = ("fast", "slow", "night")
    assert asked(lanes=lanes).lane == "fast"
    assert asked({b"x-shoal-lane": b"night"}, lanes).lane == "night"
    with pytest.raises(InvalidRequest, match="fast, slow, night") as refused:
        asked({b"x-shoal-lane": b"bulk"}, lanes)
    assert refused.value.param == "X-Shoal-Lane"


@pytest.mark.parametrize("name", [b"", b"a b", b"x" * 65, "\u00e9".encode(), b'a"b', b"a/b"])
def test_ask_refuses_a_tenant_of_other_letters(name):
    """A tenant is 1 to 64 plain characters; anything else is a 400 that names the header."""
    with pytest.raises(InvalidRequest) as refused:
        asked({b"x-shoal-tenant": name})
    assert refused.value.param == "X-Shoal-Tenant"


def test_ask_carries_the_tenant_into_the_job():
    """The tenant of the header is the job's; without the header it has none."""
    body = native.EncodeRequest("dense", "x")
    assert native.encode_job(body, asked({b"x-shoal-tenant": b"a" * 64})).tenant == "a" * 64
    assert native.encode_job(body, asked()).tenant is None


def test_openapi_shows_the_configured_lanes():
    """The description has the lanes of this server, the default first, with their rules."""
    document = json.loads(description(parse_lanes("fast:3:50ms:1s,slow:1:400ms:9s")))
    lane = document["components"]["parameters"]["Lane"]
    assert lane["schema"] == {"type": "string", "enum": ["fast", "slow"], "default": "fast"}
    assert "`slow` 1 (batches of 400 ms at most)" in lane["description"]
    openapi_spec_validator.validate(document)
