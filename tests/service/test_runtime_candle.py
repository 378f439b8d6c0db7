"""The runtime `candle` in its bundle: its vectors are the reference's, its refusals ours."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from shoal.errors import InputTooLong, InvalidRequest, ModelUnavailable, ShoalError
from shoal.ipc.messages import ItemDone, Ran, RunItem
from shoal.runtimes.registry import create
from shoal.wire.envelope import Params, Result
from tests.support.candle_texts import Held, held
from tests.support.lazy import Lazy
from tests.support.runtime_models import (
    MINILM,
    array,
    cosines,
    ids_of,
    item,
    package_path,
    run_one,
    save_tiny,
    spec,
    tokenizer,
)
from tests.support.shoal_process import Serve, ShoalProcess

torch = Lazy("torch")
transformers = Lazy("transformers")

pytestmark = pytest.mark.slow

TEXTS = [
    "hello",
    "A shoal is a group of fish that swim together.",
    "The mean time to recover was four minutes, and nobody noticed; " * 6,
    "Ein Schwarm: viele kleine Fische, die zusammen schwimmen.",
    "word " * 254,
]


@pytest.fixture(scope="module")
def cache(candle_cache):
    return candle_cache


@pytest.fixture(scope="module")
def candle(candle_cache):
    """A runtime process for all tests; each loads its own model in the place of the last."""
    with held(candle_cache) as process:
        yield process


def ran(candle: Held, model, *items: RunItem, block_tokens: int | None = None) -> Ran:
    """What becomes of a batch."""

    async def main():
        await candle.connection.load(model)
        return await candle.connection.run(model.key, list(items), block_tokens)

    return candle.run(main())


def answers(candle: Held, model, *items: RunItem, block_tokens: int | None = None):
    """The outcomes of a batch, and the padded tokens."""
    done = ran(candle, model, *items, block_tokens=block_tokens)
    return [outcome(one) for one in done.items], done.padded_tokens


def outcome(done: ItemDone) -> Result | ShoalError:
    if done.failure is not None:
        return done.failure.error()
    return msgspec.msgpack.decode(done.result, type=Result)


def encode(name, texts, **params):
    return RunItem(name, "encode", [1] * len(texts), texts=texts, params=Params(**params))


def minilm(cache, **fields):
    return spec(package_path(MINILM), cache, max_tokens=256, outputs=["dense"], **fields)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_candle_vectors_are_those_of_the_onnx_runtime(candle, cache, pooling):
    """Cosine >= 0.99999 on ragged texts, by the entry's pooling and not the folder's own."""
    onnx = create("onnx", "cpu", 1)
    onnx.load(minilm(cache, pooling=pooling))
    expected = array(run_one(onnx, item("i", ids_of(package_path(MINILM), *TEXTS))), "dense")
    (together, *alone), _ = answers(
        candle,
        minilm(cache, pooling=pooling),
        *(encode("all", TEXTS), *(encode(text, [text]) for text in TEXTS)),
    )
    assert cosines(array(together, "dense"), expected).min() >= 0.99999
    assert cosines([array(one, "dense")[0] for one in alone], expected).min() >= 0.99999


def test_candle_blocks_are_of_like_lengths_and_equal_texts_run_once(candle, cache):
    """Sorted by length into passes of at most the budget; one pass where the budget is 0."""
    lengths = [len(ids) for ids in ids_of(package_path(MINILM), *TEXTS)]
    batch = [encode("a", TEXTS), encode("b", TEXTS[::-1])]
    (first, second), padded_tokens = answers(candle, minilm(cache), *batch, block_tokens=256)
    assert sum(lengths) <= padded_tokens < len(lengths) * max(lengths)
    assert array(first, "dense") == pytest.approx(array(second, "dense")[::-1], abs=0)
    _, padded_tokens = answers(candle, minilm(cache), *batch, block_tokens=0)
    assert padded_tokens == len(lengths) * max(lengths)


def test_candle_answers_in_the_forms_of_every_runtime(candle, cache):
    """Dimensions, number formats and lengths as asked; a score is the cosine of the vectors."""
    texts = TEXTS[:3]
    outcomes, _ = answers(
        candle,
        minilm(cache, tasks=["encode", "score"]),
        encode("plain", texts),
        encode("raw", texts, normalize=False),
        encode("short", texts, dimensions=64, dtype="float16"),
        RunItem("score", "score", [1] * 3, "shared", texts=texts),
    )
    plain, raw, short = (array(each, "dense") for each in outcomes[:3])
    assert np.linalg.norm(plain, axis=1) == pytest.approx(1, abs=1e-6)
    assert np.linalg.norm(raw, axis=1).min() > 1.5
    assert (short.shape, short.dtype) == ((3, 64), np.float16)
    assert np.linalg.norm(short.astype(np.float32), axis=1) == pytest.approx(1, abs=1e-3)
    assert array(outcomes[3], "scores") == pytest.approx(plain[1:] @ plain[0], abs=1e-5)


def test_candle_faults_of_an_item_are_its_own(candle, cache):
    """Too long, an unknown output, another task: each fails alone and names what is wrong.

    Too long is cut where the request says so, to what the other runtimes read of it.
    """
    long = "word " * 300
    outcomes, _ = answers(
        candle,
        minilm(cache),
        encode("long", ["a", long]),
        encode("cut", [long], truncate=True),
        encode("sparse", ["a"], outputs=["sparse"]),
        encode("wide", ["a"], dimensions=385),
        RunItem("score", "score", [1, 1], "shared", texts=["a", "b"]),
        encode("well", ["word " * 254]),
    )
    too_long, cut, sparse, wide, score, well = outcomes
    assert isinstance(too_long, InputTooLong)
    assert too_long.input_index == 1
    assert "302 tokens and the model takes 256" in too_long.message
    assert all(isinstance(each, InvalidRequest) for each in (sparse, wide, score))
    assert cosines(array(cut, "dense"), array(well, "dense")).min() >= 0.999999


def test_candle_item_with_an_adapter_fails_alone(candle, cache):
    """An embedder has no adapters: who names one is not answered by the bare model."""
    items = (
        encode("bare", ["a"]),
        msgspec.structs.replace(encode("adapted", ["a"]), adapter="m@a@1"),
    )
    (bare, adapted), _ = answers(candle, minilm(cache), *items)
    assert isinstance(bare, Result)
    assert isinstance(adapted, ModelUnavailable)
    assert "m@a@1 is not loaded" in str(adapted)


def test_candle_text_that_is_too_long_fails_alone(candle, cache):
    """In a partial item its neighbours are answered, and it has its own error."""
    texts = ["a", "word " * 300, "b"]
    items = (encode("mixed", texts, partial=True), encode("alone", ["a", "b"]))
    mixed, alone = ran(candle, minilm(cache), *items).items
    assert list(mixed.failures) == [1]
    assert mixed.failures[1].code == InputTooLong.code
    found, expected = (array(outcome(one), "dense") for one in (mixed, alone))
    assert found == pytest.approx(expected, abs=1e-5)


def test_candle_decoder_pools_the_last_token(candle, cache, tmp_path):
    """A Qwen3 folder, as transformers saves it, without any pooling files: the reference's."""
    words = {f"w{i}": i for i in range(120)}
    plain = Tokenizer(models.WordLevel(words))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "model"
    shape = {
        "vocab_size": 120,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    network = transformers.Qwen3Model(transformers.Qwen3Config(**shape)).eval()
    network.save_pretrained(folder)
    plain.save(str(folder / "tokenizer.json"))
    lengths = (1, 3, 20, 7)
    ids = [[(7 * i + n) % 119 + 1 for i in range(n)] for n in lengths]
    texts = [" ".join(f"w{i}" for i in one) for one in ids]
    model = spec(folder, cache, pooling="last", normalize=False, max_tokens=64, outputs=["dense"])
    (result,), _ = answers(candle, model, encode("i", texts))
    with torch.inference_mode():
        for ours, one in zip(array(result, "dense"), ids, strict=True):
            theirs = network(torch.tensor([one])).last_hidden_state[0, -1].numpy()
            assert cosines([ours], [theirs]).min() >= 0.99999


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"outputs": ["sparse"]}, "dense vectors"),
        ({"pooling": "none"}, "pools by"),
        ({"max_tokens": 100_000}, "the network takes"),
        ({"weights": "pytorch_model.bin"}, "no safetensors file"),
    ],
)
def test_candle_model_that_it_cannot_serve_does_not_load(candle, cache, tmp_path, fields, what):
    """What the runtime lacks is said at the load; a pickle is never read."""
    folder = save_tiny(transformers.BertModel, tmp_path / "model")
    tokenizer(package_path(MINILM)).save(str(folder / "tokenizer.json"))
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelUnavailable, match=what):
        answers(candle, spec(folder, cache, **({"outputs": ["dense"]} | fields)))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "whale"}))
    with pytest.raises(ModelUnavailable, match="whale"):
        answers(candle, spec(folder, cache, max_tokens=16, outputs=["dense"]))


def test_candle_is_built_by_the_first_request_and_says_so(tmp_path):
    """A server without the bundle builds it: the state is `building`, then vectors agree."""
    server = Serve(tmp_path, "--devices", "cpu:1")
    try:
        load = ShoalProcess("models", "load", "minilm-candle", "--data-dir", f"{tmp_path / 'data'}")
        load.wait_for("building the bundle", 60)
        assert load.ended(100) == 0, load.output
        vectors = []
        for model in ("minilm", "minilm-candle"):
            answer = server.post("/v1/embeddings", {"model": model, "input": TEXTS})
            assert answer.status_code == 200, answer.text
            vectors.append([row["embedding"] for row in answer.json()["data"]])
        assert cosines(*map(np.array, vectors)).min() >= 0.99999
    finally:
        assert server.leave() == 0, server.output
