"""Files, structures and errors in place over a real socket, in every form that a body may have."""

from __future__ import annotations

from base64 import b64encode

import httpx
import msgspec
import numpy as np
import pytest

from shoal.runtimes.null_records import record
from shoal.wire.envelope import Params
from tests.support.bad_files import WAV, form, png_header
from tests.support.gateway_server import gateway_server
from tests.support.lazy import Lazy
from tests.support.local_submits import token_vectors, vector

openai = Lazy("openai")

PNG = png_header(3, 5)
BROKEN = PNG + b"broken"
PDF = b"%PDF-1.7\n/Type /Page\n"
MSGPACK = {"content-type": "application/msgpack", "accept": "application/msgpack"}


@pytest.fixture(scope="module")
def served():
    with gateway_server() as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    with httpx.Client(base_url=served.url) as client:
        yield client


def text(data):
    return b64encode(data).decode()


def packed(client, path, **body):
    answer = client.post(path, content=msgspec.msgpack.encode(body), headers=MSGPACK)
    assert answer.status_code == 200, answer.content
    return msgspec.msgpack.decode(answer.content)


def ok(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_files_are_the_same_in_every_form_of_a_body(client, served):
    """JSON, a data URI, MessagePack, the raw file and a form: the same bytes in the same job."""
    whole = b"\0\xff\r\n--x\r\n".join([PNG, b"end"])
    sends = [
        lambda: ok(
            client.post("/v1/encode", json={"model": "pictures", "inputs": {"data": text(whole)}})
        ),
        lambda: ok(
            client.post(
                "/v1/encode",
                json={"model": "pictures", "inputs": f"data:image/png;base64,{text(whole)}"},
            )
        ),
        lambda: packed(client, "/v1/encode", model="pictures", inputs={"data": whole}),
        lambda: ok(
            client.post(
                "/v1/encode?model=pictures&dimensions=4&outputs=dense",
                content=whole,
                headers={"content-type": "image/png"},
            )
        ),
        lambda: ok(
            client.post(
                "/v1/encode",
                content=form(("model", b"pictures"), ("inputs=a", whole), boundary="yy"),
                headers={"content-type": 'multipart/form-data; boundary="yy"'},
            )
        ),
    ]
    for send in sends:
        assert send()["model"] == "pictures"
        job = served.submits.jobs[-1]
        assert (job.inputs.blobs, job.params.outputs) == ([whole], ["dense"])
    assert [job.params.dimensions for job in served.submits.jobs[-5:]] == [
        None,
        None,
        None,
        4,
        None,
    ]


def test_files_of_a_form_may_be_many(client, served):
    """Parts of one name are a list, in order."""
    body = form(("inputs=a", PNG), ("model", b"pictures"), ("inputs=b", PNG + b"2"))
    headers = {"content-type": "multipart/form-data; boundary=x"}
    ok(client.post("/v1/encode", content=body, headers=headers))
    assert served.submits.jobs[-1].inputs.blobs == [PNG, PNG + b"2"]


def test_files_that_fail_leave_their_places(client):
    """Wrong kind, no bytes, broken: each has its error in place, the good ones their vectors."""
    files = [PNG, PDF, b"", BROKEN, PNG + b"2"]
    body = {"model": "pictures", "inputs": [{"data": text(data)} for data in files]}
    answer = ok(client.post("/v1/encode", json=body))
    assert [row is None for row in answer["dense"]] == [False, True, True, True, False]
    assert np.allclose(answer["dense"][4], vector(files[4]))
    assert [(e["index"], e["param"], e["code"]) for e in answer["errors"]] == [
        (at, f"inputs[{at}]", "invalid_request") for at in (1, 2, 3)
    ]
    assert "pdf" in answer["errors"][0]["message"]
    body = {"model": "pictures", "inputs": [{"data": data} for data in files]}
    answer = packed(client, "/v1/encode", **body)
    block = answer["dense"][4]
    assert np.array_equal(np.frombuffer(block["data"], "<f4"), vector(files[4]))
    assert answer["dense"][1:4] == [None] * 3


def test_files_that_all_fail_are_an_error(client):
    """Without one good input the first error is the answer, under its own place."""
    files = [{"data": text(data)} for data in (b"", BROKEN)]
    answer = client.post("/v1/encode", json={"model": "pictures", "inputs": files})
    assert (answer.status_code, answer.json()["param"]) == (400, "inputs[1]")
    answer = client.post("/v1/encode", json={"model": "pictures", "inputs": files[1]})
    assert (answer.status_code, answer.json()["param"]) == (400, "inputs")


def test_texts_that_fail_leave_their_places(client):
    """One text too long of three fails alone, in encode, classify and extract; a block is whole."""
    inputs = ["a", "w " * 600, "b"]
    answer = ok(client.post("/v1/classify", json={"model": "colours", "inputs": inputs}))
    assert [("error" in one, "scores" in one) for one in answer["results"]] == [
        (False, True),
        (True, False),
        (False, True),
    ]
    assert answer["results"][1]["error"]["code"] == "input_too_long"
    answer = ok(client.post("/v1/encode", json={"model": "dense", "inputs": inputs}))
    assert [row is None for row in answer["dense"]] == [False, True, False]
    answer = packed(client, "/v1/encode", model="dense", inputs=["a", "b"])
    assert (answer["dense"]["shape"], "errors" in answer) == ([2, 8], False)


def test_encode_gives_token_vectors_and_other_dtypes(client):
    """Token vectors come per input; float16 and int8 are written as numbers and as blocks."""
    answer = ok(client.post("/v1/encode", json={"model": "tokens", "inputs": ["a b", "c"]}))
    assert [np.shape(one) for one in answer["multivector"]] == [(2, 8), (1, 8)]
    assert np.allclose(answer["multivector"][0], token_vectors("a b"))
    for dtype in ("float16", "int8"):
        body = {"model": "dense", "inputs": ["a"], "dtype": dtype}
        block = packed(client, "/v1/encode", **body)["dense"]
        assert block["dtype"] == dtype
        expected = (vector("a") * 100).astype(dtype)
        assert np.array_equal(np.frombuffer(block["data"], dtype), expected)
        row = ok(client.post("/v1/encode", json=body))["dense"][0]
        assert np.array_equal(np.array(row, dtype), expected)


def test_extract_slices_entities_from_the_original(client):
    """Offsets count characters, and each entity's text is what stands there, emoji and all."""
    inputs = ["🐟 Ada Lovelace", "w " * 600, "Zürich"]
    body = {"model": "names", "inputs": inputs, "threshold": 0.0}
    results = ok(client.post("/v1/extract", json=body))["results"]
    assert "error" in results[1]
    for at, word in ((0, "Lovelace"), (2, "Zürich")):
        (entity,) = results[at]["entities"]
        assert entity["text"] == word == inputs[at][entity["start"] : entity["end"]]
    body["labels"] = ["odd" if results[0]["entities"][0]["label"] == "even" else "even"]
    results = ok(client.post("/v1/extract", json=body))["results"]
    assert results[0]["entities"] == []  # asked for and not found, which is not left out


def test_extract_reads_documents_and_sounds(client):
    """Pages with lines and regions, the text in one piece, speech with its times."""
    query = "/v1/extract?model=pages&outputs=text,layout"
    answer = ok(client.post(query, content=PDF, headers={"content-type": "application/pdf"}))
    (found,) = answer["results"]
    expected = record(PDF, ["text", "layout"], Params()).pages[0]
    assert found["text"] == expected.lines[0].text == found["pages"][0]["lines"][0]["text"]
    assert found["pages"][0]["regions"][0]["label"] == expected.regions[0].label
    assert "entities" not in found
    answer = packed(client, "/v1/extract", model="sounds", inputs=[{"data": WAV}])
    assert answer["results"][0]["segments"][0]["start_s"] == 0.0
    assert answer["results"][0]["duration_s"] == len(WAV) / 32_000


def test_classify_takes_files_and_judges_labels_one_by_one(client):
    """`top_k` keeps the best; with `multi_label` each score stands for itself."""
    query = "/v1/classify?model=files&top_k=2"
    kind = {"content-type": "application/octet-stream"}
    (one,) = ok(client.post(query, content=b"\x7fELF", headers=kind))["results"]
    assert (len(one["scores"]), "labels" in one) == (2, False)
    body = {"model": "colours", "inputs": "x", "multi_label": True, "threshold": 0.5}
    (one,) = ok(client.post("/v1/classify", json=body))["results"]
    logits = vector("x", 3) * 4
    scores = {c["label"]: c["score"] for c in one["scores"]}
    assert np.allclose(
        [scores[n] for n in ("red", "green", "blue")], 1 / (1 + np.exp(-logits)), atol=1e-6
    )
    assert one["labels"] == [c["label"] for c in one["scores"] if c["score"] >= 0.5]


def test_classify_refuses_to_judge_labels_one_by_one_without_logits(client):
    """Where a model gives probabilities alone, `multi_label` is a 400 that names it."""
    body = {"model": "files", "inputs": [{"data": "AAAA"}]}
    assert ok(client.post("/v1/classify", json=body))["results"]
    refused = client.post("/v1/classify", json=body | {"multi_label": True})
    assert (refused.status_code, refused.json()["param"]) == (400, "multi_label")
    assert "no logits" in refused.json()["message"]


@pytest.fixture(scope="module")
def official(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_client_transcribes(official, served):
    """audio.transcriptions.create in all its forms, from bytes with a name."""
    file = ("speech.wav", WAV, "audio/wav")

    def create(**options):
        return official.audio.transcriptions.create(model="sounds", file=file, **options)

    said = record(WAV, ["transcript"], Params()).text
    assert create(language="de").text == said
    assert served.submits.jobs[-1].params.language == "de"
    verbose = create(response_format="verbose_json", timestamp_granularities=["segment"])
    assert (verbose.text, verbose.language) == (said, "en")
    assert verbose.segments[0].end == verbose.duration == len(WAV) / 32_000
    assert create(response_format="text") == f"{said}\n"
    assert create(response_format="srt") == f"1\n00:00:00,000 --> 00:00:00,001\n{said}\n"
    assert create(response_format="vtt").startswith("WEBVTT\n\n00:00:00.000 --> ")
    with pytest.raises(openai.BadRequestError) as refused:
        create(timestamp_granularities=["word"], response_format="verbose_json")
    assert "segment" in refused.value.message


def test_openai_client_moderates(official):
    """moderations.create with and without a model: harmless labels are no categories of harm."""
    for options in ({}, {"model": "guard"}):
        answer = official.moderations.create(input=["x", "y"], **options)
        assert answer.model == "guard"
        for given, one in zip(["x", "y"], answer.results, strict=True):
            scores = one.category_scores.model_dump()
            assert {"attack", "odd"} <= set(scores)
            assert "safe" not in scores
            powers = np.exp(vector(given, 3) * 4)
            assert np.isclose(scores["attack"], powers[1] / powers.sum())
            assert one.flagged == any(scores[label] >= 0.5 for label in ("attack", "odd"))
    parts = [{"type": "text", "text": "x"}]
    assert official.moderations.create(input=parts).results[0].flagged in (True, False)
