"""The routes that generate, over a real socket: the official client, streams, and leaving them."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import msgspec
import pytest

from tests.support.gateway_server import gateway_server
from tests.support.lazy import Lazy
from tests.support.local_texts import LONG_WORDS, PROMPT_TOKENS, WORDS, words_of
from tests.support.pace import limit_s
from tests.support.raw_http import connect, post, read_all, until

openai = Lazy("openai")

CHAT, PLAIN, NATIVE = "/v1/chat/completions", "/v1/completions", "/v1/generate"
WRITE_TIMEOUT_S = limit_s(1.0)
STEP_BYTES = 32 * 1024


@pytest.fixture(scope="module")
def served():
    with gateway_server(send_bytes=4096, write_timeout_s=WRITE_TIMEOUT_S) as server:
        yield server


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asking(text):
    return [{"role": "user", "content": text}]


def whole(text, **fields):
    """What continues a message of a user."""
    return "".join(words_of(f"user: {text}", **fields))


def events(response):
    """The data of each event, decoded; `[DONE]` as it is."""
    frames = [frame for frame in response.text.split("\n\n") if frame.startswith("data: ")]
    data = [frame.removeprefix("data: ") for frame in frames]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def test_generate_openai_client_chats(client):
    """A whole answer has text, reason and usage; two choices differ by their seeds."""
    made = client.chat.completions.create(
        model="writer", messages=asking("hi"), n=2, seed=5, logprobs=True, top_logprobs=1
    )
    assert [choice.message.content for choice in made.choices] == [
        whole("hi", seed=5),
        whole("hi", seed=6),
    ]
    assert [choice.finish_reason for choice in made.choices] == ["stop", "stop"]
    assert made.usage.prompt_tokens == PROMPT_TOKENS
    assert made.usage.completion_tokens == 2 * WORDS
    tokens = made.choices[0].logprobs.content
    assert [one.token for one in tokens] == words_of("user: hi", seed=5)
    assert all(one.top_logprobs[0].token == one.token for one in tokens)


def test_generate_openai_client_streams_a_chat(client):
    """Chunks joined are the whole text of each choice; the last one has the usage."""
    texts, roles, reasons, usage = ["", ""], [], {}, None
    stream = client.chat.completions.create(
        model="writer",
        messages=asking("hi"),
        n=2,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        assert usage is None
        usage = chunk.usage
        for choice in chunk.choices:
            roles += [(choice.index, choice.delta.role)] if choice.delta.role else []
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [whole("hi", seed=1), whole("hi", seed=2)]
    assert sorted(roles) == [(0, "assistant"), (1, "assistant")]
    assert reasons == {0: "stop", 1: "stop"}
    assert usage.completion_tokens == 2 * WORDS


def test_generate_openai_client_completes_and_streams_texts(client):
    """Both prompts are answered in their places, streamed as whole, and cut at `max_tokens`."""
    plain = client.completions.create(model="writer", prompt=["a", "b"], max_tokens=3, logprobs=1)
    texts = ["".join(words_of(prompt, 3)) for prompt in "ab"]
    assert [choice.text for choice in plain.choices] == texts
    assert {choice.finish_reason for choice in plain.choices} == {"length"}
    assert plain.choices[0].logprobs.tokens == words_of("a", 3)
    streamed = ["", ""]
    for chunk in client.completions.create(
        model="writer", prompt=["a", "b"], max_tokens=3, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_generate_openai_client_streams_many_at_once(served):
    """The async client's many streams at once are never crossed."""

    async def one(client, prompt):
        stream = await client.chat.completions.create(
            model="org/Writer", messages=asking(prompt), stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            prompts = [f"prompt {i}" for i in range(40)]
            texts = await asyncio.gather(*(one(client, prompt) for prompt in prompts))
            assert texts == [whole(prompt) for prompt in prompts]

    asyncio.run(main())


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_generate_openai_client_raises_an_error_in_mid_stream(client, path):
    """What had come is there, then the client raises; the next request is served."""
    prompt = "this is cut"
    stream = (
        client.chat.completions.create(model="writer", messages=asking(prompt), stream=True)
        if path == CHAT
        else client.completions.create(model="writer", prompt=prompt, stream=True)
    )
    got = []

    def read():
        got.extend(stream)

    with pytest.raises(openai.APIError, match="the engine went away") as broken:
        read()
    assert broken.value.code == "runtime_crashed"
    assert got
    client.completions.create(model="writer", prompt="next")


def test_generate_error_before_the_first_event_is_an_ordinary_one(served, client):
    """An error that comes before any text has its own status, in the form of `Accept`."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="writer",
            messages=asking("x"),
            stream=True,
            response_format={"type": "json_object"},
        )
    assert refused.value.param == "response_format"
    for fields, status in (
        ({"inputs": "fail:queue_full"}, 429),
        ({"inputs": "boom"}, 500),
        ({"inputs": "x", "model": "dense"}, 400),
        ({"inputs": "x", "model": "nobody"}, 404),
    ):
        body = {"model": "writer", "stream": True, **fields}
        answer = httpx.post(
            f"{served.url}{NATIVE}", json=body, headers={"accept": "application/msgpack"}
        )
        assert answer.status_code == status
        assert msgspec.msgpack.decode(answer.content)["request_id"]


def test_generate_native_stream_is_pieces_and_numbers(served):
    """Events are JSON also for a request in MessagePack; times are told at the end."""
    body = {"model": "writer", "inputs": ["a", "b"], "stream": True, "logprobs": 1}
    packed = {"content-type": "application/msgpack", "accept": "application/msgpack"}
    answer = httpx.post(
        f"{served.url}{NATIVE}", content=msgspec.msgpack.encode(body), headers=packed
    )
    assert answer.headers["content-type"] == "text/event-stream"
    head = answer.headers["server-timing"]
    assert all(f"{name};dur=" in head for name in ("queue", "load", "run", "ttft"))
    assert answer.headers["x-request-id"]
    *pieces, last = events(answer)
    for index, prompt in enumerate("ab"):
        words = [piece["text"] for piece in pieces if piece["index"] == index]
        assert words == words_of(prompt)
    assert pieces[0]["logprobs"][0]["token"] == pieces[0]["text"]
    assert last["usage"]["completion_tokens"] == 2 * WORDS
    assert [one["finish_reason"] for one in last["data"]] == ["stop", "stop"]
    comment = next(line for line in answer.text.splitlines() if line.startswith(": server-timing "))
    assert all(f"{name};dur=" in comment for name in ("queue", "load", "run", "ttft", "tpot"))


def test_generate_native_stream_ends_with_an_error_event(served):
    """A fault in mid-stream is the last event, and has the native shape inside `error`."""
    body = {"model": "writer", "inputs": "it is cut", "stream": True}
    answer = httpx.post(f"{served.url}{NATIVE}", json=body)
    *pieces, last = events(answer)
    assert "".join(piece["text"] for piece in pieces) == "".join(words_of("it is cut", 3))
    assert set(last["error"]) == {"code", "message", "param", "request_id"}
    assert last["error"]["code"] == "runtime_crashed"


def test_generate_whole_answers_have_their_times(served):
    """Server-Timing and the metrics know the first token and the further ones."""
    answer = httpx.post(f"{served.url}{NATIVE}", json={"model": "writer", "inputs": "t"})
    assert answer.json()["data"][0]["text"] == "".join(words_of("t"))
    assert ", ttft;dur=3.00, tpot;dur=4.00" in answer.headers["server-timing"]
    metrics = httpx.get(f"{served.url}/metrics").text
    labels = '{model="writer",route="generate"}'
    assert f"shoal_gateway_generated_tokens_total{labels}" in metrics
    assert f"shoal_gateway_first_token_seconds_count{labels}" in metrics


def test_generate_stream_with_an_idempotency_key_is_refused(served):
    """A stream is not kept: a key with it is refused by name before anything runs."""
    answer = httpx.post(
        f"{served.url}{PLAIN}",
        json={"model": "writer", "prompt": "x", "stream": True},
        headers={"idempotency-key": "k"},
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "Idempotency-Key"


@pytest.mark.parametrize(("prompt", "requests"), [("we stay", 1), ("so long", 2)])
def test_generate_client_that_leaves_in_mid_stream_ends_its_texts(served, prompt, requests):
    """A connection that ends cancels the stream at once, also where a request waits behind it."""
    before = len(served.submits.cancelled)
    body = {"model": "writer", "prompt": prompt, "max_tokens": 100_000, "stream": True}
    request = post(body, path=PLAIN)
    with connect(served.port, receive_bytes=4096) as peer:
        peer.sendall(request * requests)
        got = b""
        while b"data: " not in got:
            got += peer.recv(4096)
    until(lambda: len(served.submits.cancelled) > before)


def test_generate_stream_keeps_the_connection(served):
    """Behind the end of a stream the next request is answered on the same connection."""
    request = post({"model": "writer", "prompt": "k", "stream": True}, path=PLAIN)
    last = post({"model": "writer", "prompt": "k"}, "Connection: close", path=PLAIN)
    with connect(served.port) as peer:
        peer.sendall(request + request + last)
        answer = read_all(peer)
    assert answer.count(b"HTTP/1.1 200 ") == 3
    assert answer.count(b"data: [DONE]") == 2
    assert answer.count(b"0\r\n\r\n") == 2


def test_generate_slow_reader_gets_all_of_it(served):
    """A reader that is slower than the text, but steady, is never cut off."""
    body = {"model": "writer", "inputs": "a long", "stream": True}
    got, begun = b"", time.monotonic()
    with connect(served.port, receive_bytes=4096) as peer:
        peer.sendall(post(body, "Connection: close", path=NATIVE))
        while part := peer.recv(64 * 1024):
            if len(got) // STEP_BYTES < (len(got) + len(part)) // STEP_BYTES:
                time.sleep(WRITE_TIMEOUT_S / 5)
            got += part
    assert time.monotonic() - begun > WRITE_TIMEOUT_S
    assert b'"finish_reason"' in got
    assert got.count(b"data: ") == LONG_WORDS + 1


def test_generate_reader_that_stands_still_is_cut_off(served):
    """A stream that nobody reads ends after `write_timeout_s`, and its texts with it."""
    before = served.server.edge.cut_off
    cancelled = len(served.submits.cancelled)
    with connect(served.port, receive_bytes=4096) as peer:
        peer.sendall(post({"model": "writer", "inputs": "so long", "stream": True}, path=NATIVE))
        until(lambda: served.server.edge.cut_off > before, timeout_s=10)
        until(lambda: len(served.submits.cancelled) > cancelled)


def test_generate_shutdown_in_mid_stream_is_told():
    """A gateway that has to leave before a text is whole ends its stream with an error event."""
    with gateway_server() as served, connect(served.port) as peer:
        peer.sendall(post({"model": "writer", "inputs": "we stay", "stream": True}, path=NATIVE))
        got = b""
        while got.count(b"data: ") < 3:
            got += peer.recv(4096)
        served.app.draining = True
        served.server.should_exit = True
        got += read_all(peer)
    assert b'"code":"shutting_down"' in got
    assert got.endswith(b"0\r\n\r\n")
    assert served.submits.cancelled
