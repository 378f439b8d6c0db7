"""Every task of the demo catalog on its real weights, over HTTP, through the queue.

JSON, MessagePack and the client; good and bad inputs together; and what the answers are worth. That
a network computes what its reference does is shown elsewhere: here it is asked as callers ask.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode

import httpx
import msgspec
import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer

from shoal import AsyncClient, Client
from shoal.client import InputsFailed
from shoal.errors import InputTooLong, InvalidRequest
from shoal.runtimes.registry import available
from tests.support.bad_files import png_header
from tests.support.debian_faq import questions_and_answers
from tests.support.files import encoded, lines_of_page, page, pdf, raw_pdf, silence, spoken, wav
from tests.support.lazy import Lazy
from tests.support.pace import limit_s
from tests.support.runtime_models import MINILM, package_path

openai = Lazy("openai")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

MSGPACK = {"content-type": "application/msgpack", "accept": "application/msgpack"}
TEXTS = ["A shoal is a group of fish.", "The train to Zürich was late.", "Paris is in France."]
QUERY = "What is the capital of France?"
PII = "🐟 My name is Sarah Connor, write to sarah@example.com."
PLAIN_PAGE = encoded(page(), "PNG")
LAYOUT_PAGE = encoded(page(height=1_300), "PNG")


@pytest.fixture(scope="module")
def client(live_server):
    with Client(live_server, timeout_s=limit_s(60)) as client:
        yield client


@pytest.fixture(scope="module")
def http(live_server):
    with httpx.Client(base_url=live_server, timeout=limit_s(60)) as http:
        yield http


@pytest.fixture(scope="module")
def official(live_server):
    with openai.OpenAI(base_url=f"{live_server}/v1", api_key="none", max_retries=0) as official:
        yield official


def in_json(http, path, **body):
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def packed(http, path, **body):
    answer = http.post(path, content=msgspec.msgpack.encode(body), headers=MSGPACK)
    assert answer.status_code == 200, answer.content
    return msgspec.msgpack.decode(answer.content)


def block(array):
    """An array of a MessagePack answer."""
    return np.frombuffer(array["data"], array["dtype"]).reshape(array["shape"])


def as_json(data):
    return {"data": b64encode(data).decode()}


async def ask(client, model):
    """One fitting call for each task of a model."""
    files = {"image": PLAIN_PAGE, "document": PLAIN_PAGE, "file": PLAIN_PAGE}
    files["audio"] = spoken("hello_world")[0]
    one = files.get(model.inputs[0], TEXTS[0])
    pairs = [(TEXTS[0], TEXTS[1])] if "score" in model.tasks else [one]
    calls = {
        "encode": lambda: client.encode_outputs([one], model.id, list(model.outputs)),
        "score": lambda: client.score(QUERY, TEXTS, model.id),
        "classify": lambda: client.classify(pairs, model.id),
        "extract": lambda: client.extract([one], model.id, outputs=model.extracts),
        "transcribe": lambda: client.transcribe(one, model.id),
    }
    return [await calls[task]() for task in model.tasks]


def test_serve_tasks_of_all_models_at_once(live_server):
    """A dozen real models and more answer on one machine, every task of each, asked together."""

    async def everything():
        async with AsyncClient(live_server, timeout_s=limit_s(110)) as client:
            # What runs in a bundle is installed at first, and has tests of its own.
            models = [one for one in await client.models() if available(one.runtime) is None]
            answers = await asyncio.gather(*(ask(client, model) for model in models))
            return dict(zip((model.id for model in models), answers, strict=True)), models

    answers, models = asyncio.run(everything())
    assert len(answers) >= 12
    assert {task for model in models for task in model.tasks} == {
        *("encode", "score", "classify", "extract", "transcribe")
    }
    assert all(len(answers[model.id]) == len(model.tasks) for model in models)


@pytest.mark.parametrize("model", ["all-minilm-l6-v2", "tokenlearn-static"])
def test_serve_dense_is_the_same_in_every_form(client, http, model):
    """JSON, MessagePack and the client give the same vectors; so does every dtype, as it can."""
    vectors = client.encode(TEXTS, model)
    body = {"model": model, "inputs": TEXTS}
    assert np.allclose(in_json(http, "/v1/encode", **body)["dense"], vectors, atol=1e-6)
    assert np.allclose(block(packed(http, "/v1/encode", **body)["dense"]), vectors, atol=1e-6)
    half = client.encode(TEXTS, model, dtype="float16")
    assert half.dtype == np.float16
    assert np.allclose(half, vectors, atol=1e-3)
    small = client.encode(TEXTS, model, dtype="int8").astype(float)
    cosines = (small * vectors).sum(1) / np.linalg.norm(small, axis=1)
    assert cosines.min() > 0.999
    bits = client.encode(TEXTS, model, dtype="binary")
    assert np.array_equal(np.unpackbits(bits, axis=1), vectors > 0)


def test_serve_sparse_and_token_vectors_are_the_same_in_every_form(client, http):
    """Sparse weights and a vector for each token, by JSON, MessagePack and the client."""
    sparse = client.encode_sparse(TEXTS, "splade-tiny")
    body = {"model": "splade-tiny", "inputs": TEXTS, "outputs": ["sparse"]}
    as_text, as_blocks = (send(http, "/v1/encode", **body)["sparse"] for send in (in_json, packed))
    for one, text, blocks in zip(sparse, as_text, as_blocks, strict=True):
        assert len(one.indices) > 2
        assert text["indices"] == one.indices.tolist() == block(blocks["indices"]).tolist()
        assert np.allclose(text["values"], one.values, atol=1e-6)
    tokens = client.encode_outputs(TEXTS, "minilm-maxsim", ["multivector"]).multivector
    body = {"model": "minilm-maxsim", "inputs": TEXTS, "outputs": ["multivector"]}
    as_text, as_blocks = (
        send(http, "/v1/encode", **body)["multivector"] for send in (in_json, packed)
    )
    for one, text, blocks in zip(tokens, as_text, as_blocks, strict=True):
        assert one.shape == block(blocks).shape
        assert np.allclose(text, one, atol=1e-6)
        assert np.allclose(np.linalg.norm(one, axis=1), 1, atol=1e-3)


def test_serve_images_are_the_same_in_every_form(client, http):
    """A picture's vector, sent raw, as base64, as MessagePack and by the client; others differ."""
    model = "efficientnet-lite0"
    mandelbrot = Image.effect_mandelbrot((300, 200), (-2, -1, 1, 1), 60).convert("RGB")
    vectors = client.encode([PLAIN_PAGE, encoded(mandelbrot, "JPEG")], model)
    assert vectors.shape == (2, 1280)
    headers = {"content-type": "image/png"}
    raw = http.post(f"/v1/encode?model={model}", content=PLAIN_PAGE, headers=headers)
    answers = [
        raw.json()["dense"],
        in_json(http, "/v1/encode", model=model, inputs=as_json(PLAIN_PAGE))["dense"],
        block(packed(http, "/v1/encode", model=model, inputs={"data": PLAIN_PAGE})["dense"]),
    ]
    for answer in answers:
        assert np.allclose(answer, vectors[:1], atol=1e-4)
    lengths = np.linalg.norm(vectors, axis=1)
    assert vectors[0] @ vectors[1] / lengths.prod() < 0.9


def test_serve_score_of_a_thousand_candidates_keeps_their_order(client):
    """Split into many items, each score is that of its own text; equal texts rank as they came."""
    texts = [f"{TEXTS[n % 3]} Number {n // 6}." for n in range(1_000)]  # in pairs of equal ones
    scores = client.score(QUERY, texts, "minilm")
    some = range(0, len(texts), 13)
    expected = client.encode([texts[n] for n in some], "minilm") @ client.encode(QUERY, "minilm")[0]
    assert np.allclose(scores[some], expected, atol=1e-4)
    ranked = client.rerank(QUERY, texts, "tokenlearn-static")
    assert sorted(one.index for one in ranked) == list(range(len(texts)))
    order = [(-one.score, one.index) for one in ranked]
    assert order == sorted(order)
    assert len({one.score for one in ranked}) <= len(set(texts)) < len(texts)


def test_serve_score_by_token_vectors_and_by_a_pair_head(client):
    """MaxSim is the mean of each query token's best; both kinds put the answer first."""
    query, *documents = client.encode_outputs(
        [QUERY, *TEXTS], "minilm-maxsim", ["multivector"]
    ).multivector
    expected = [(query @ document.T).max(axis=1).mean() for document in documents]
    assert np.allclose(client.score(QUERY, TEXTS, "minilm-maxsim"), expected, atol=1e-4)
    for model in ("minilm-maxsim", "splade-tiny"):
        assert client.rerank(QUERY, TEXTS, model)[0].document == TEXTS[2]


def test_serve_entities_stand_where_they_are_in_the_text(client, http):
    """Personal data and names with offsets in characters, an emoji before them, in every form."""
    expected = [("GIVEN_NAME", "Sarah"), ("SURNAME", "Connor"), ("EMAIL", "sarah@example.com")]
    (found,) = client.extract([PII], "pii-rampart")
    assert [(one.label, one.text) for one in found.entities] == expected
    assert all(PII[one.start : one.end] == one.text for one in found.entities)
    body = {"model": "pii-rampart", "inputs": [PII], "labels": ["EMAIL"]}
    for send in (in_json, packed):
        (only,) = send(http, "/v1/extract", **body)["results"][0]["entities"]
        assert only["text"] == expected[2][1] == PII[only["start"] : only["end"]]
    text = "Ada Lovelace met Charles Babbage in London in 1833."
    (found,) = client.extract([text], "en-core-web-sm")
    names = {text[one.start : one.end]: one.label for one in found.entities}
    assert names["Ada Lovelace"] == names["Charles Babbage"] == "PERSON"
    assert names["London"] == "GPE"


def test_serve_documents_are_read_in_every_form(client, http):
    """PNG, JPEG and the two pages of a PDF sent as they are: every line, in reading order."""
    lines = lines_of_page()
    both = client.extract([PLAIN_PAGE, encoded(page(), "JPEG")], "pp-ocrv6")
    assert [one.text.splitlines() for one in both] == [lines, lines]
    second = ["Second of them", *lines[1:]]
    answer = http.post(
        "/v1/extract?model=pp-ocrv6&outputs=text",
        content=pdf([page(), page(second[0])]),
        headers={
            "content-type": "application/pdf",
            "X-Shoal-Deadline-Ms": f"{limit_s(60) * 1e3:.0f}",
        },
    )
    assert answer.status_code == 200, answer.text
    (found,) = answer.json()["results"]
    assert found["text"].splitlines() == lines + second
    read = [[line["text"] for line in one["lines"]] for one in found["pages"]]
    assert read == [lines, second]


def test_serve_layout_finds_the_regions_of_a_page(client, http):
    """Two columns and a table where they were drawn, by the client and in JSON."""
    (found,) = client.extract([LAYOUT_PAGE], "layout", outputs=["layout"])
    regions = found.pages[0].regions
    assert {"text", "table"} <= {one.label for one in regions}
    (table,) = [one for one in regions if one.label == "table"]
    assert table.box == pytest.approx((60, 380, 940, 520), abs=40)
    body = {"model": "layout", "inputs": as_json(LAYOUT_PAGE), "labels": ["table"]}
    (only,) = in_json(http, "/v1/extract", **body)["results"][0]["pages"][0]["regions"]
    assert only["box"] == pytest.approx(table.box, abs=1)


def test_serve_classes_of_images_and_files(client, http):
    """A page looks like one, no picture of ours is unfit for work, and a file is what it is."""
    (best,) = client.classify([PLAIN_PAGE], "efficientnet-lite0", top_k=1)
    assert best.label == "web site"
    (guarded,) = client.classify([PLAIN_PAGE], "image-guard")
    assert guarded.label == "safe"
    kinds = {"png": PLAIN_PAGE, "pdf": pdf([page()]), "wav": spoken("hello_world")[0]}
    found = client.classify(list(kinds.values()), "magika")
    assert [one.label for one in found] == list(kinds)
    body = {"model": "magika", "inputs": [as_json(one) for one in kinds.values()], "top_k": 1}
    assert [one["label"] for one in in_json(http, "/v1/classify", **body)["results"]] == list(kinds)


def test_serve_moderation_of_an_image_by_the_openai_client(official, client):
    """The guard's one harmful label is the category, with the score that it gives on its own."""
    url = f"data:image/png;base64,{b64encode(PLAIN_PAGE).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    made = official.moderations.create(model="open-nsfw", input=[part])
    (one,) = made.results
    (guarded,) = client.classify([PLAIN_PAGE], "open-nsfw")
    scores = one.category_scores.model_dump()
    assert scores["nsfw"] == pytest.approx(guarded.scores["nsfw"], abs=1e-4)
    assert "safe" not in scores
    assert one.flagged is False


def test_serve_speech_is_heard_and_written(official, client, http):
    """Words by the OpenAI client and ours, as text with times; where there is speech at all."""
    sound, said = spoken("quick_brown_fox")
    file = ("fox.wav", sound)
    made = official.audio.transcriptions.create(model="whisper-tiny-en", file=file)
    assert words(made.text) == words(said)
    whole = official.audio.transcriptions.create(
        model="whisper-tiny-en", file=file, response_format="verbose_json"
    )
    assert words("".join(one.text for one in whole.segments)) == words(said)
    assert whole.segments[-1].end <= whole.duration + 0.5
    assert words(client.transcribe(sound, "whisper-tiny-en").text) == words(said)
    (heard,) = client.extract([sound], "silero-vad")
    (stretch,) = heard.segments
    assert 0 <= stretch.start_s < 0.5 < stretch.end_s <= heard.duration_s
    answer = packed(http, "/v1/extract", model="silero-vad", inputs=[{"data": sound}])
    assert answer["results"][0]["segments"][0]["start_s"] == pytest.approx(stretch.start_s)


def words(text):
    return "".join(c for c in text.lower() if c.isalpha() or c == " ").split()


PNG_CUT = PLAIN_PAGE[:900]
MIXED = {
    "minilm": ("encode", [TEXTS[0], "word " * 400, TEXTS[1]], {1: InputTooLong}),
    "efficientnet-lite0": (
        "encode",
        [PLAIN_PAGE, b"", PNG_CUT, png_header(7_072, 7_072), pdf([page()]), PLAIN_PAGE],
        dict.fromkeys((1, 2, 3, 4), InvalidRequest),
    ),
    "open-nsfw": (
        "classify",
        [PNG_CUT, PLAIN_PAGE, b"hello"],
        dict.fromkeys((0, 2), InvalidRequest),
    ),
    "layout": (
        "extract",
        [raw_pdf(pages=1, encrypted=True), LAYOUT_PAGE, raw_pdf(), b"%PDF-1.7 cut", b""],
        dict.fromkeys((0, 2, 3, 4), InvalidRequest),
    ),
    "silero-vad": (
        "extract",
        [spoken("hello_world")[0], spoken("hello_world")[0][:30], wav(silence(1)), PLAIN_PAGE],
        dict.fromkeys((1, 3), InvalidRequest),
    ),
}


@pytest.mark.parametrize("model", MIXED)
def test_serve_bad_inputs_among_good_ones_fail_alone(client, model):
    """Each has its own error in its place, and the others get what they get without them."""
    task, inputs, bad = MIXED[model]
    call = getattr(client, task)
    with pytest.raises(InputsFailed) as failed:
        call(inputs, model)
    errors = failed.value.errors
    assert {at: type(error) for at, error in errors.items()} == bad
    assert all(f"[{at}]" in error.param for at, error in errors.items())
    good = [one for at, one in enumerate(inputs) if at not in bad]
    alone = call(good, model)
    if task == "encode":
        assert np.allclose(failed.value.results, alone, atol=1e-4)
    elif task == "classify":
        assert [one.label for one in failed.value.results] == [one.label for one in alone]
    else:
        assert failed.value.results == alone


def test_serve_silence_is_no_speech(client):
    """A second of silence has no stretch of speech and no transcript made up for it."""
    still = wav(silence(1))
    assert client.extract([still], "silero-vad")[0].segments == []
    assert client.transcribe(still, "whisper-tiny-en").text == ""


# Recall at 1 and mean reciprocal rank of all-MiniLM-L6-v2, answers cut at 192 tokens.
FAQ = (0.594, 0.709)
FAQ_TOKENS = 192


def test_serve_retrieval_finds_the_answers_of_the_debian_faq(client):
    """Each question's answer among all the others, as often as the model is known to find it."""
    faq = questions_and_answers()
    tokenizer = Tokenizer.from_file(str(package_path(MINILM) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(FAQ_TOKENS)
    questions, answers = (
        client.encode([one.ids for one in tokenizer.encode_batch(list(texts))], "all-minilm-l6-v2")
        for texts in zip(*faq, strict=True)
    )
    scores = questions @ answers.T
    rank = 1 + (scores > scores.diagonal()[:, None]).sum(axis=1)
    noise = (FAQ[0] * (1 - FAQ[0]) / len(faq)) ** 0.5
    assert ((rank == 1).mean(), (1 / rank).mean()) == pytest.approx(FAQ, abs=noise)
