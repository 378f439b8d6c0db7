"""What every runtime keeps to that generates, whatever engine is in it.

As in `test_contract`: the names of the tests are those of the claims, their docstrings the words of
the documentation.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from dataclasses import replace

import pytest
from msgspec import structs

from shoal.errors import CallerError, InputTooLong, ModelUnavailable, ShoalError
from shoal.ipc.messages import Failed, Finished, Grown, RunItem
from tests.contract.process import Process
from tests.contract.small import continued
from tests.contract.speaking import Said, Speaking
from tests.contract.tainted import damaged

pytestmark = pytest.mark.slow

LONG_TOKENS = 40
SEEDS = range(4)
ENUM = ("shoal", "flock")


def test_contract_capacity(speaking: Speaking):
    """It says how many texts may grow at once, and what the model takes; it is one that streams."""
    loaded, key = speaking.loaded, speaking.subject.entry.key
    assert speaking.hello.traits.streams
    assert "generate" in speaking.hello.traits.tasks
    assert loaded.slots > 0
    assert loaded.kv_tokens >= 0
    assert 0 < loaded.memory_bytes <= speaking.memory().process_bytes
    assert set(speaking.memory().models) == {key}


def test_contract_generated_parity(speaking: Speaking, tmp_path):
    """Without chance, it says what the makers' own code says with the same weights."""
    subject = speaking.subject
    exact = subject.exact(tmp_path / "exact")
    other = Speaking(replace(subject, entry=exact), speaking.folder)
    other.start()
    try:
        said = other.say(*map(other.item, subject.prompts))
    finally:
        other.leave()
    expected = continued(tmp_path / "exact", subject.prompts, subject.tokens)
    assert [one.text for one in said] == expected
    assert len(set(expected)) == len(expected)


def test_contract_streaming(speaking: Speaking):
    """Pieces come in order and joined are the whole; their tokens are counted and timed."""
    prompt = speaking.subject.prompts[0]
    (streamed,) = speaking.say(speaking.item(prompt, stream=True))
    (whole,) = speaking.say(speaking.item(prompt))
    assert len(streamed.pieces) > 1
    assert "".join(piece.text for piece in streamed.pieces) == streamed.text == whole.text
    assert whole.pieces == []
    told = streamed.generated
    assert sum(piece.tokens for piece in streamed.pieces) == told.tokens == speaking.subject.tokens
    assert (told.prompt_tokens, told.tokens) == (
        whole.generated.prompt_tokens,
        whole.generated.tokens,
    )
    assert min(told.prompt_tokens, told.first_token_s, told.token_s) > 0


def test_contract_max_tokens(speaking: Speaking):
    """A text ends at `max_tokens`, with the reason `length`; less of it is its beginning."""
    prompt, most = speaking.subject.prompts[0], speaking.subject.tokens
    full = speaking.alone[prompt]
    assert (full.tokens, full.finish_reason) == (most, "length")
    for fewer in (1, most // 2):
        (said,) = speaking.say(speaking.item(prompt, max_tokens=fewer))
        assert (said.generated.tokens, said.generated.finish_reason) == (fewer, "length")
        assert full.text.startswith(said.text)
        assert len(said.text) < len(full.text)


def test_contract_text_mates(speaking: Speaking):
    """Without chance, a text does not depend on those beside it, however many there are."""
    prompts = [*speaking.subject.prompts, *reversed(speaking.subject.prompts)]
    said = speaking.say(*(speaking.item(prompt, stream=True) for prompt in prompts))
    assert [one.text for one in said] == [speaking.alone[prompt].text for prompt in prompts]
    assert len({one.text for one in said}) == len(speaking.subject.prompts)


def test_contract_stop_texts(speaking: Speaking):
    """A stop text ends the text before it, wherever pieces part it; nothing of it is sent."""
    prompt = speaking.subject.prompts[1]
    (full,) = speaking.say(speaking.item(prompt, stream=True))
    borders = list(itertools.accumulate(len(piece.text) for piece in full.pieces))
    for border in (borders[2], borders[len(borders) // 2]):
        stop = full.text[border - 2 : border + 2]  # a part of it in one piece, a part in the next
        assert len(stop) == 4
        before = full.text.split(stop)[0]
        (said,) = speaking.say(speaking.item(prompt, stream=True, stop=["\0no", stop]))
        assert (said.text, said.generated.finish_reason) == (before, "stop")
        assert "".join(piece.text for piece in said.pieces) == before
    (said,) = speaking.say(speaking.item(prompt, stop=[full.text + "!"]))
    assert (said.text, said.generated.finish_reason) == (full.text, "length")


def test_contract_seeds(speaking: Speaking):
    """The same seed gives the same text again, beside others too; another seed another one."""
    prompt = speaking.subject.prompts[0]

    def items() -> list[RunItem]:
        return [speaking.item(prompt, temperature=1.0, seed=seed) for seed in SEEDS]

    together = [one.text for one in speaking.say(*items())]
    alone = [speaking.say(item)[0].text for item in items()]
    assert together == alone
    assert len(set(together)) > 1


def test_contract_logprobs(speaking: Speaking):
    """Each token has its log probability, in the pieces as in the whole, and no more than asked."""
    prompt = speaking.subject.prompts[0]
    (said,) = speaking.say(speaking.item(prompt, stream=True, logprobs=1))
    told = said.generated
    assert len(told.logprobs) == told.tokens
    tokens = "".join(one.token for one in told.logprobs)
    assert tokens == said.text
    assert [one for piece in said.pieces for one in piece.logprobs] == told.logprobs
    for one in told.logprobs:
        assert one.logprob <= 0
        assert math.isfinite(one.logprob)
        assert [token for token, _ in one.top] == [one.token]  # the likeliest was taken
    assert speaking.alone[prompt].logprobs == []


def test_contract_schema(speaking: Speaking):
    """With a JSON schema, the text is JSON that fits it; one that is no schema is refused."""
    prompt, schema = speaking.subject.prompts[0], json.dumps({"enum": list(ENUM)})
    said, refused = speaking.say(
        speaking.item(prompt, schema=schema, max_tokens=LONG_TOKENS),
        speaking.item(prompt, schema='{"type":"nothing"}'),
    )
    assert said.generated.finish_reason == "stop"
    assert json.loads(said.text) in ENUM
    assert isinstance(refused.whole, CallerError)
    assert refused.whole.param == "schema"


def test_contract_chat_template(speaking: Speaking):
    """A conversation becomes the prompt that the model's own template makes of it."""
    turns, rendered = speaking.subject.chat
    said, same, other = speaking.say(
        speaking.chat(turns), speaking.item(rendered), speaking.chat(turns[1:])
    )
    assert said.text == same.text
    assert said.generated.prompt_tokens == same.generated.prompt_tokens
    assert other.generated.prompt_tokens != said.generated.prompt_tokens


def test_contract_prompt_too_long(speaking: Speaking):
    """A prompt that leaves no room in the context is refused, and those beside it are not."""
    prompt = speaking.subject.prompts[0]
    long = "word " * speaking.subject.entry.max_tokens
    first, refused, last = speaking.say(
        *(speaking.item(one, stream=True) for one in (prompt, long, prompt))
    )
    assert isinstance(refused.whole, InputTooLong)
    assert refused.pieces == []
    assert first.text == last.text == speaking.alone[prompt].text


def test_contract_poisoned_text(speaking: Speaking):
    """An item that cannot be generated for fails alone; the texts beside it grow on."""
    prompts = speaking.subject.prompts[:2]
    poison = speaking.renamed(speaking.subject.poison)
    one, failed, other = speaking.say(
        speaking.item(prompts[0], stream=True), poison, speaking.item(prompts[1], stream=True)
    )
    assert isinstance(failed.whole, ShoalError)
    assert [one.text, other.text] == [speaking.alone[prompt].text for prompt in prompts]


def test_contract_cancellation(speaking: Speaking):
    """A stopped text ends at once, and its slot is free: others grow on, and one more begins."""
    prompts = list(itertools.islice(itertools.cycle(speaking.subject.prompts), speaking.slots))
    items = [speaking.item(prompt, stream=True, max_tokens=LONG_TOKENS) for prompt in prompts]
    newcomer = speaking.item(prompts[0], stream=True)
    said, late = [Said() for _ in items], Said()

    async def steps() -> None:
        begun = zip(items, said, strict=True)
        running = [asyncio.ensure_future(speaking.growing(item, one)) for item, one in begun]
        while not all(one.pieces for one in said):
            await asyncio.sleep(0.001)
        running[0].cancel()
        await asyncio.gather(running[0], return_exceptions=True)
        await asyncio.gather(speaking.growing(newcomer, late), *running[1:])

    speaking.heard.clear()
    speaking.drive(steps())
    stopped, *others, new = speaking.calls().values()
    (end,) = [answer for answer in stopped if isinstance(answer, Finished)]
    assert end is stopped[-1]
    assert end.generated.finish_reason == "cancelled"
    assert end.generated.tokens < LONG_TOKENS
    heard = list(speaking.heard)
    assert heard.index(new[0]) < min(heard.index(answers[-1]) for answers in others)
    assert late.text == speaking.alone[prompts[0]].text
    for one, prompt in zip(said[1:], prompts[1:], strict=True):
        assert one.generated.tokens == LONG_TOKENS or one.generated.finish_reason == "stop"
        assert one.text.startswith(speaking.alone[prompt].text)


def test_contract_one_end(speaking: Speaking):
    """Each text ends once, however it ends, and nothing is said of it after that."""
    prompt = speaking.subject.prompts[0]
    ends = [
        speaking.item(prompt, stream=True),
        speaking.item(prompt, stream=True, stop=[speaking.alone[prompt].text[2:5]]),
        speaking.renamed(speaking.subject.poison),
    ]
    speaking.heard.clear()
    speaking.say(*ends)
    speaking.say(speaking.item(prompt))  # whatever was late has come before its end
    assert len(speaking.calls()) == len(ends) + 1
    for answers in speaking.calls().values():
        assert [isinstance(answer, Grown) for answer in answers[:-1]] == [True] * (len(answers) - 1)
        assert isinstance(answers[-1], Finished | Failed)


def test_contract_generator_broken_load(speaking: Speaking, tmp_path):
    """Damaged weights fail the load by a typed error, and the process takes good ones then."""
    subject = speaking.subject
    fresh = Process(subject.runtime, speaking.folder)
    fresh.start()
    try:
        spec = fresh.spec(subject.entry)
        path = damaged(spec.path, tmp_path / "damaged", subject.weights)
        for broken in (tmp_path / "nowhere", path):
            with pytest.raises(ModelUnavailable):
                fresh.wait(fresh.connection.load(structs.replace(spec, path=str(broken))))
        assert fresh.memory().models == {}
        assert fresh.load(subject.entry).slots == speaking.slots
    finally:
        fresh.leave()


def test_contract_generator_not_loaded(speaking: Speaking):
    """Unloaded, it generates nothing and says so; loaded again, it says the same as before."""
    entry, prompt = speaking.subject.entry, speaking.subject.prompts[0]
    before = speaking.alone[prompt].text
    speaking.unload(entry)
    assert speaking.memory().models == {}
    (refused,) = speaking.say(speaking.item(prompt))
    assert isinstance(refused.whole, ModelUnavailable)
    assert speaking.load(entry).slots == speaking.slots
    assert speaking.say(speaking.item(prompt))[0].text == before
