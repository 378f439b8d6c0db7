"""Texts through the whole system: gateway, queue, worker and a runtime process of made-up words."""

from __future__ import annotations

import asyncio
import json
import re
import time

import httpx
import pytest

from shoal.runtimes.null_texts import CRASH_AT, word
from tests.conftest import until
from tests.support.lazy import Lazy
from tests.support.metrics import metric
from tests.support.pace import limit_s
from tests.support.raw_http import connect, post, read_all
from tests.support.shoal_process import Serve

openai = Lazy("openai")

# Times of words are stretched, so that what else a request takes is as small a part of a text's.
GENERATORS = {
    "words": "{tokens: 12}",
    "narrow": f"{{tokens: 5000, token_s: {limit_s(0.005):.4f}, slots: 1}}",
    "crowded": f"{{tokens: 20, token_s: {limit_s(0.05):.4f}, slots: 4}}",
    "fragile": "{tokens: 20, token_s: 0.05, crash: dynamite}",
}
NATIVE, PLAIN = "/v1/generate", "/v1/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Serve(tmp_path_factory.mktemp("texts"), "--devices", "cpu:1", generators=GENERATORS)
    yield server
    assert server.leave() == 0, server.output


def port(server):
    return int(server.url.rpartition(":")[2])


def words(prompt, n=12, seed=0):
    return "".join(word(prompt, at, seed) for at in range(n))


def generate(server, **body):
    return server.post(NATIVE, body)


def stream(server, **body):
    """The events of a stream, decoded."""
    with httpx.stream(
        "POST", f"{server.url}{NATIVE}", json={**body, "stream": True}, timeout=limit_s(30)
    ) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_serve_generate_choices_have_seeds_of_their_own(server, streamed):
    """Three choices of two prompts are in their places, each with the next seed."""
    body = {"model": "words", "inputs": ["a", "b"], "n": 3, "seed": 5}
    wanted = [words(prompt, seed=5 + choice) for prompt in "ab" for choice in range(3)]
    if streamed:
        *pieces, last = stream(server, **body)
        texts = ["".join(p["text"] for p in pieces if p["index"] == at) for at in range(6)]
        usage = last["usage"]
    else:
        made = generate(server, **body).json()
        texts, usage = [one["text"] for one in made["data"]], made["usage"]
    assert texts == wanted
    assert usage == {"prompt_tokens": 2, "completion_tokens": 72, "total_tokens": 74}


def test_serve_generate_stop_text_across_pieces_is_never_told(server):
    """A stop text that lies over the border of two tokens ends the text before it, streamed too."""
    whole = words("stop here")
    third, fourth = word("stop here", 2, 0), word("stop here", 3, 0)
    stop = third[-3:] + fourth[:2]
    before = whole[: whole.index(stop)]
    made = generate(server, model="words", inputs="stop here", stop=[stop]).json()["data"][0]
    assert (made["text"], made["finish_reason"]) == (before, "stop")
    *pieces, last = stream(server, model="words", inputs="stop here", stop=[stop])
    assert "".join(piece["text"] for piece in pieces) == before
    assert last["data"][0]["finish_reason"] == "stop"


def test_serve_generate_refusals_of_the_runtime_name_the_field(server):
    """What a worker or its runtime refuses comes back under the name of the request, and as 400."""
    refused = server.post(
        "/v1/chat/completions",
        {
            "model": "words",
            "messages": [{"role": "user", "content": "x"}],
            "response_format": {"type": "json_object"},
            "stream": True,
        },
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "response_format"


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_serve_generate_prompt_that_is_too_long_is_named(server, streamed):
    """Of a list the error names the prompt as its caller counts it, whatever `n` is."""
    long = "word " * 600
    bodies = {
        PLAIN: ("prompt[1]", {"prompt": ["a", long], "n": 2}),
        NATIVE: ("inputs[1]", {"inputs": ["a", long], "n": 2}),
        "/v1/chat/completions": ("messages", {"messages": [{"role": "user", "content": long}]}),
    }
    for path, (param, body) in bodies.items():
        answer = server.post(path, {"model": "words", "stream": streamed, **body})
        text = answer.text
        if answer.headers["content-type"] == "text/event-stream":
            text = text.rpartition("data: ")[2]
        error = json.loads(text)
        error = error.get("error", error)
        assert (error["code"], error["param"]) == ("input_too_long", param)


def test_serve_generate_client_that_leaves_frees_its_slot(server):
    """The only slot of a model is free for the next request as soon as its client has gone."""
    body = {"model": "narrow", "inputs": "a", "stream": True}
    with connect(port(server)) as peer:
        peer.sendall(post(body, path=NATIVE))
        got = b""
        while b"data: " not in got:
            got += peer.recv(4096)
    begun = time.monotonic()
    made = generate(server, model="narrow", inputs="b", max_tokens=3).json()
    assert made["data"][0]["text"] == words("b", 3)
    # To its end the first text would have taken 25 s, stretched as this is.
    assert time.monotonic() - begun < limit_s(10)


def test_serve_generate_slow_reader_holds_no_slot(server):
    """A client that has read a byte does not keep the model from others; it gets its text later."""
    body = {"model": "narrow", "inputs": "slow", "stream": True, "max_tokens": 300, "n": 1}
    with connect(port(server), receive_bytes=2048) as peer:
        peer.sendall(post(body, "Connection: close", path=NATIVE))
        assert peer.recv(1)
        made = generate(server, model="narrow", inputs="next", max_tokens=2)
        assert made.json()["data"][0]["text"] == words("next", 2)
        assert b'"finish_reason"' in read_all(peer)


def test_serve_generate_engine_that_is_lost_in_mid_stream_is_told(server):
    """What had come is there, the client raises, and the next request is served."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        got = []
        events = client.completions.create(model="fragile", prompt="dynamite", stream=True)

        def read():
            got.extend(chunk.choices[0].text for chunk in events)

        with pytest.raises(openai.APIError) as lost:
            read()
        assert lost.value.code == "runtime_crashed"
        assert "".join(got) == words("dynamite", CRASH_AT - 1)
        again = client.completions.create(model="fragile", prompt="calm", max_tokens=4)
        assert again.choices[0].text == words("calm", 4)


def test_serve_generate_deadline_in_mid_stream_is_an_error_event(server):
    """The deadline bounds the whole answer: what came by then, and an event that says so."""
    time_s = limit_s(1.0)
    assert generate(server, model="narrow", inputs="x", max_tokens=1).status_code == 200
    with httpx.stream(
        "POST",
        f"{server.url}{NATIVE}",
        json={"model": "narrow", "inputs": "late", "stream": True},
        headers={"x-shoal-deadline-ms": f"{time_s * 1e3:.0f}"},
        timeout=limit_s(30),
    ) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert answer.status_code == 200
    *pieces, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert last["error"]["code"] == "deadline_exceeded"
    told = re.search(r"\((.+) s; the header `X-Shoal-Deadline-Ms`", last["error"]["message"])
    assert time_s / 2 < float(told[1]) <= time_s + 0.05
    assert words("late", 5000).startswith("".join(piece["text"] for piece in pieces))
    assert generate(server, model="narrow", inputs="x", max_tokens=1).status_code == 200


def test_serve_generate_overload_is_refused_early_and_free_slots_are_used(server):
    """Nobody is refused while a slot is free; then whoever cannot be in time hears it at once.

    Until then every text had grown alone, and had all four slots' device to itself.
    """
    generate(server, model="crowded", inputs="first")
    heard_s = time.monotonic() + limit_s(2)  # by then the gateway has heard of it
    while time.monotonic() < heard_s:
        alone_s = generate(server, model="crowded", inputs="alone").elapsed.total_seconds()

    async def ask(client, prompt, time_s, **asked):
        body = {"model": "crowded", "inputs": prompt, **asked}
        headers = {"x-shoal-deadline-ms": f"{time_s * 1e3:.0f}"}
        answer = await client.post(NATIVE, json=body, headers=headers)
        return answer, answer.elapsed.total_seconds()

    async def main():
        async with httpx.AsyncClient(base_url=server.url, timeout=limit_s(30)) as client:
            three = [asyncio.create_task(ask(client, f"{n}", 2 * alone_s)) for n in range(3)]
            await until(lambda: metric(server.url, "shoal_gateway_waiting_items") >= 3)
            short = await ask(client, "short", alone_s / 2, max_tokens=2)
            burst = [asyncio.create_task(ask(client, f"b {n}", 4 * alone_s)) for n in range(30)]
            return short, await asyncio.gather(*three), await asyncio.gather(*burst)

    short, three, burst = asyncio.run(main())
    assert [answer.status_code for answer, _ in (short, *three)] == [200] * 4
    statuses = [answer.status_code for answer, _ in burst]
    assert statuses.count(200) >= 4, statuses
    assert statuses.count(429) >= 12, statuses
    # On a busy machine a text may take longer than those before it.
    assert statuses.count(504) <= statuses.count(200) / 2, statuses
    for answer, took_s in burst:
        if answer.status_code == 429:
            assert took_s < alone_s
            assert 1 <= int(answer.headers["retry-after"]) <= 30 * alone_s


def test_serve_generate_card_names_the_routes(server):
    """A generator's card has its three routes, and the other routes refuse it by name."""
    card = httpx.get(f"{server.url}/v1/models/words").json()
    assert card["endpoints"] == ["/v1/chat/completions", "/v1/completions", "/v1/generate"]
    refused = server.post("/v1/embeddings", {"model": "words", "input": "x"})
    assert refused.status_code == 400
    assert "/v1/generate" in refused.json()["error"]["message"]
