"""Both clients' generated texts, and `shoal run`'s, from a real server whose words are made up."""

from __future__ import annotations

import asyncio
import time

import pytest
from typer.testing import CliRunner

from shoal import AsyncClient, Client
from shoal.cli.main import app
from shoal.errors import (
    DeadlineExceeded,
    InputTooLong,
    InvalidRequest,
    RuntimeCrashed,
    ShoalError,
    UnknownModel,
    Unreachable,
)
from shoal.runtimes.null_texts import word
from tests.support.pace import limit_s
from tests.support.shoal_process import Serve

TOKEN_S = limit_s(0.01)
GENERATORS = {
    "words": "{tokens: 8}",
    "slow": f"{{tokens: 2000, token_s: {TOKEN_S:.3f}, slots: 1}}",
    "fragile": "{tokens: 20, token_s: 0.05, crash: 'user: dynamite'}",
}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    server = Serve(tmp_path_factory.mktemp("texts"), "--devices", "cpu:1", generators=GENERATORS)
    yield server.url
    assert server.leave() == 0, server.output


class Awaited:
    """The asynchronous client and what it gives, used like the other one."""

    def __init__(self, url, **options):
        self._runner = asyncio.Runner()
        self._client = AsyncClient(url, **options)

    def __getattr__(self, name):
        method = getattr(self._client, name)

        def call(*args, **options):
            found = self._runner.run(method(*args, **options))
            return AwaitedText(self._runner, found) if name.endswith("_stream") else found

        return call

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._runner.run(self._client.close())
        self._runner.close()


class AwaitedText:
    """A growing text of the asynchronous client."""

    def __init__(self, runner, growing):
        self._runner = runner
        self._growing = growing

    def __iter__(self):
        return self

    def __next__(self):
        async def following():
            return await anext(self._growing, None)

        part = self._runner.run(following())
        if part is None:
            raise StopIteration
        return part

    @property
    def generated(self):
        return self._growing.generated

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._runner.run(self._growing.__aexit__())


@pytest.fixture(params=[Client, Awaited], ids=["sync", "async"])
def client(request, url):
    with request.param(url, max_retries=1) as client:
        yield client


def words(prompt: str, n: int, seed: int | None = None) -> str:
    return "".join(word(prompt, at, seed) for at in range(n))


def test_client_generates_in_the_order_of_the_prompts(client):
    """Each prompt has its own text, with its reason and tokens; the settings reach the model."""
    prompts = [f"one of {n}" for n in range(5)]
    found = client.generate(prompts, "words", seed=7, max_tokens=4)
    assert [one.text for one in found] == [words(prompt, 4, seed=7) for prompt in prompts]
    assert {(one.finish_reason, one.tokens) for one in found} == {("length", 4)}
    assert {one.prompt_tokens for one in found} == {3 * len(prompts)}
    (stopped,) = client.generate("a", "words", stop=[words("a", 3)[-3:]])
    assert stopped.finish_reason == "stop"
    assert words("a", 3).startswith(stopped.text)


def test_client_chats(client):
    """A conversation gets its next turn; a text alone is a user's first turn."""
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    assert client.chat(turns, "words").text == words("system: Be brief.\nuser: Who?", 8)
    assert client.chat("Who?", "words").text == words("user: Who?", 8)


def test_client_streams_parts_as_they_grow(client):
    """Parts come before the text has ended; joined they are the whole, which has the numbers."""
    begun_s = time.monotonic()
    with client.generate_stream("grow", "slow", max_tokens=60) as growing:
        first = next(growing)
        first_s = time.monotonic() - begun_s
        parts = [first, *growing]
    took_s = time.monotonic() - begun_s
    assert "".join(parts) == words("grow", 60) == growing.generated.text
    assert (growing.generated.finish_reason, growing.generated.tokens) == ("length", 60)
    assert growing.generated.prompt_tokens == 1
    assert len(parts) > 3
    assert took_s - first_s > 20 * TOKEN_S  # of the time of sixty words


def test_client_with_keys_for_all_calls_streams_without_one(client, url):
    """Streams take no `Idempotency-Key`: a client that has one for every call leaves it out."""
    with type(client)(url, idempotency_key="auto") as keyed:
        with keyed.chat_stream("keyed", "words") as growing:
            assert "".join(growing) == words("user: keyed", 8)
        assert keyed.chat("keyed", "words") == growing.generated
        with pytest.raises(InvalidRequest):
            keyed.chat_stream("keyed", "words", idempotency_key="mine")


def test_client_that_leaves_a_text_frees_its_slot(client):
    """Left early, a text of twenty seconds, stretched or not, makes room for the next at once."""
    for _ in range(2):
        with client.chat_stream("endless", "slow") as growing:
            assert next(growing)
    begun_s = time.monotonic()
    assert client.generate("short", "slow", max_tokens=2)[0].text == words("short", 2)
    assert time.monotonic() - begun_s < limit_s(5.0)


def test_client_raises_the_error_in_the_middle_of_a_text(client):
    """A runtime that dies in the middle is a typed error, after the parts that came before."""
    parts = []
    with client.chat_stream("dynamite", "fragile") as growing, pytest.raises(RuntimeCrashed):
        parts.extend(growing)
    assert words("user: dynamite", 3).startswith("".join(parts))
    assert client.chat("again", "fragile", timeout_s=limit_s(30)).text


@pytest.mark.parametrize(
    ("arguments", "options", "kind"),
    [
        (("long " * 600, "words"), {}, InputTooLong),
        (("a", "nobody"), {}, UnknownModel),
        (("a", "words"), {"max_tokens": 0}, InvalidRequest),
        (("a", "words"), {"schema": {"type": "object"}}, InvalidRequest),
        (("a", "slow"), {"timeout_s": 0.3}, DeadlineExceeded),
    ],
)
def test_client_refusals_are_the_same_whole_and_streamed(client, arguments, options, kind):
    """What is wrong before a text begins is raised by the call, streamed or not."""
    with pytest.raises(kind):
        client.generate(*arguments, **options)
    with (
        pytest.raises(kind),
        client.generate_stream(*arguments, **options) as growing,
    ):
        list(growing)


def test_client_streams_nothing_where_nobody_answers(client):
    """An absent server is `Unreachable`, and an argument that there is not a `TypeError`."""
    kind = type(client)
    with kind("http://127.0.0.1:1", max_retries=0) as lost, pytest.raises(Unreachable):
        lost.generate_stream("a", "words")
    with pytest.raises(TypeError, match="tempo"):
        client.generate_stream("a", "words", tempo=1)


def shown(url: str, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["run", "--url", url, *arguments])
    if isinstance(result.exception, ShoalError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_run_shows_generated_texts(url):
    """`shoal run` prints each text as it is, under its own words where there are several."""
    assert shown(url, "words", "Who?") == words("user: Who?", 8) + "\n"
    options = ("--seed", "3", "--max-tokens", "2", "--system", "Be brief.")
    found = shown(url, "words", "[b]One?", "Two?", *options)
    one, two = (words(f"system: Be brief.\nuser: {text}", 2, 3) for text in ("[b]One?", "Two?"))
    assert found == f"> [b]One?\n{one}\n> Two?\n{two}\n"
    with pytest.raises(InvalidRequest, match="takes no --query"):
        shown(url, "words", "a", "--query", "b", "--task", "generate")
