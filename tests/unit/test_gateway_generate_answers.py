"""What the routes that generate answer and tell, as pure functions."""

from __future__ import annotations

import msgspec
import pytest

from shoal.errors import Bug, RuntimeCrashed
from shoal.gateway import chat, completions, generate
from shoal.gateway.ask import ask
from shoal.gateway.forms import JSON, MSGPACK
from shoal.gateway.jobs import Answer
from shoal.gateway.routes import TASKS
from shoal.gateway.timing import speed_of
from shoal.gateway.traffic import Traffic
from shoal.settings import GatewaySettings
from shoal.wire.envelope import Result, Timing
from shoal.wire.generation import Generated, Piece, TokenLogprob, pack
from tests.support.local_submits import CATALOG

ROUTES = {route.path: route for route in TASKS if route.stream is not None}
CHAT, PLAIN, NATIVE = "/v1/chat/completions", "/v1/completions", "/v1/generate"
HELLO = [{"role": "user", "content": "hello"}]


def asked(**settings):
    settings = GatewaySettings(**settings)
    return ask({}, "r", CATALOG, settings, ("interactive", "bulk"))


def body(path, **fields):
    given = {"messages": HELLO} if path == CHAT else {}
    given = {"prompt": "hello"} if path == PLAIN else given
    given = {"inputs": "hello"} if path == NATIVE and "messages" not in fields else given
    return ROUTES[path].reader.read(JSON.encode({"model": "writer", **given, **fields}), JSON)


def job(path, **fields):
    return ROUTES[path].job(body(path, **fields), asked())


def text(words="a b", tokens=2, **fields):
    return Generated(words, fields.pop("finish_reason", "stop"), 3, tokens, **fields)


def answer(*texts):
    return Answer(Result(records=[pack(one) for one in texts]), 9, Timing(run_s=0.5))


def test_generation_usage_counts_a_prompt_once():
    """Several choices of one prompt have read it once; what they generated adds up."""
    made = job(PLAIN, prompt=["a", "b"], n=2)
    usage = completions.completion_answer(body(PLAIN, n=2), made, answer(*[text()] * 4), JSON).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 8, 14)


def test_generation_logprobs_have_the_shapes_of_each_route():
    """A token, its UTF-8 or its place, and the likeliest; a logarithm of zero stays a number."""
    tokens = [TokenLogprob("é", -0.5, [("é", -0.5)]), TokenLogprob("b", float("-inf"))]
    one = text("éb", logprobs=tokens)
    fields = {"logprobs": True, "top_logprobs": 1}
    made = chat.chat_answer(body(CHAT, **fields), job(CHAT, **fields), answer(one), JSON)
    first, second = msgspec.to_builtins(made.choices[0].logprobs.content)
    assert first == {
        "token": "é",
        "logprob": -0.5,
        "bytes": list("é".encode()),
        "top_logprobs": [{"token": "é", "logprob": -0.5, "bytes": list("é".encode())}],
    }
    assert second["logprob"] == -9999.0
    plain = body(PLAIN, logprobs=1)
    made = completions.completion_answer(plain, job(PLAIN, logprobs=1), answer(one), JSON)
    assert msgspec.to_builtins(made.choices[0].logprobs) == {
        "tokens": ["é", "b"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"é": -0.5}, {}],
        "text_offset": [0, 1],
    }


@pytest.mark.parametrize("form", [JSON, MSGPACK], ids=lambda form: form.name)
def test_generation_native_answer_has_what_was_asked(form):
    """Texts with their numbers; logarithms only where they were asked for."""
    made = generate.native_answer(body(NATIVE), job(NATIVE), answer(text()), form)
    decoded = (msgspec.json if form is JSON else msgspec.msgpack).decode(form.encode(made))
    assert decoded == {
        "model": "writer",
        "data": [{"index": 0, "text": "a b", "finish_reason": "stop", "tokens": 2}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def test_generation_text_that_was_cut_short_is_no_answer():
    """A worker that was told to stop has nothing to answer with; too few texts are a bug."""
    with pytest.raises(RuntimeCrashed):
        generate.native_answer(
            body(NATIVE), job(NATIVE), answer(text(finish_reason="cancelled")), JSON
        )
    with pytest.raises(Bug):
        generate.native_answer(body(NATIVE), job(NATIVE, n=2), answer(text()), JSON)


def test_generation_chat_events_begin_with_the_role_of_each_choice():
    """Role first, then text, a reason at the end of each, and the numbers where asked for."""
    request = body(CHAT, n=2, stream=True, stream_options={"include_usage": True})
    telling = chat.ChatTelling(request, job(CHAT, n=2))
    events = [
        *telling.piece(0, Piece("", 1)),  # nothing is certain yet
        *telling.piece(0, Piece("a ", 1)),
        *telling.piece(0, Piece("b", 1)),
        *telling.end(0, text()),
        *telling.end(1, text("", 0, finish_reason="length")),
        *telling.last([text(), text("", 0)]),
    ]
    made = msgspec.to_builtins(events)
    assert [[(c["index"], c["delta"], c["finish_reason"]) for c in e["choices"]] for e in made] == [
        [(0, {"role": "assistant", "content": "a "}, None)],
        [(0, {"content": "b"}, None)],
        [(0, {}, "stop")],
        [(1, {"role": "assistant", "content": ""}, None)],
        [(1, {}, "length")],
        [],
    ]
    assert [e["usage"] and e["usage"]["completion_tokens"] for e in made] == [None] * 5 + [2]
    assert len({(e["id"], e["created"]) for e in made}) == 1


def test_generation_completion_events_count_offsets_on():
    """Places of tokens are those in the whole text, also in later pieces."""
    telling = completions.CompletionTelling(body(PLAIN, logprobs=0), job(PLAIN, logprobs=0))
    pieces = [Piece(word, 1, [TokenLogprob(word, -0.5)]) for word in ("ab", "c", "d")]
    events = [event for piece in pieces for event in telling.piece(0, piece)]
    assert [event.choices[0].logprobs.text_offset for event in events] == [[0], [2], [3]]
    assert "usage" not in msgspec.to_builtins(events[0])


def test_generation_native_stream_ends_with_the_numbers():
    """Pieces, and one last event: the answer without its texts."""
    telling = generate.NativeTelling(body(NATIVE), job(NATIVE))
    (piece,) = telling.piece(0, Piece("a b", 2))
    assert msgspec.to_builtins(piece) == {"index": 0, "text": "a b"}
    assert telling.end(0, text()) == []
    (last,) = telling.last([text()])
    assert msgspec.to_builtins(last)["data"] == [{"index": 0, "finish_reason": "stop", "tokens": 2}]


def test_traffic_counts_texts_by_route_and_model():
    """Generated tokens and both times are there, under the model's own id."""
    traffic, made = Traffic(), job(PLAIN)
    texts = [text(tokens=3, token_s=0.02)]
    assert traffic.add_texts("completions", made, texts, speed_of(texts, 0.3)) == 3
    found = {m.name: m.samples for m in traffic.collect()}
    (tokens,) = found["shoal_gateway_generated_tokens"]
    assert (tokens.value, tokens.labels) == (3, {"route": "completions", "model": "writer"})
    buckets = {s.labels.get("le"): s.value for s in found["shoal_gateway_first_token_seconds"]}
    assert (buckets["0.25"], buckets["0.5"]) == (0, 1)
    assert any(s.value == 0.02 for s in found["shoal_gateway_token_seconds"])
