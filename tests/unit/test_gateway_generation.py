"""The routes that generate, as pure functions."""

from __future__ import annotations

import msgspec
import pytest

from shoal.errors import InvalidRequest, ShoalError
from shoal.gateway import chat, completions, generate
from shoal.gateway.ask import ask
from shoal.gateway.costs import EXPECTED_TOKENS, MAX_LEARNT, TextLengths, costs
from shoal.gateway.forms import JSON, MSGPACK, Reader
from shoal.gateway.generation import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_SCHEMA_BYTES,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_STOPS_OPENAI,
)
from shoal.gateway.routes import TASKS
from shoal.settings import GatewaySettings
from shoal.wire.generation import ChatMessage, Generated, Generation
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


# --- requests


@pytest.mark.parametrize("path", ROUTES)
def test_generation_fields_travel_as_they_are(path):
    """What a request asks for is what a worker is told, on every route."""
    made = job(
        path,
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.1,
        presence_penalty=-0.1,
        stop=["\n", "END"],
        seed=7,
        n=2,
        stream=True,
    )
    told = made.params.generation
    assert (told.max_tokens, told.temperature, told.top_p, told.seed, told.n, told.stream) == (
        *(7, 0.5, 0.9, 7, 2, True),
    )
    assert (told.frequency_penalty, told.presence_penalty, told.stop) == (0.1, -0.1, ["\n", "END"])
    assert made.task == "generate"


@pytest.mark.parametrize("path", ROUTES)
def test_generation_defaults_leave_everything_to_the_model(path):
    """A request with nothing but its prompt, or with nulls, has a bare `Generation`.

    Only texts of OpenAI's old route end after 16 tokens, which is what its users expect.
    """
    nulls = dict.fromkeys(("max_tokens", "temperature", "top_p", "stop", "seed", "n", "stream"))
    usual = Generation(max_tokens=16) if path == PLAIN else Generation()  # as OpenAI's has it
    assert job(path).params.generation == job(path, **nulls).params.generation == usual


@pytest.mark.parametrize("path", ROUTES)
def test_generation_of_more_tokens_than_the_context_is_bounded_by_it(path):
    """A huge `max_tokens` is accepted, however many digits it has, and cut to the context."""
    assert (
        job(path, max_tokens=10**30).params.generation.max_tokens
        == CATALOG.get("writer@1").max_tokens
    )


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
def test_generation_seed_is_one_that_engines_take(seed):
    """Every seed of OpenAI's range becomes one from 0 that leaves room for each choice's own."""
    told = job(PLAIN, seed=seed).params.generation.seed
    assert 0 <= told <= 2**63 - 1 - MAX_CHOICES


def test_generation_bound_of_a_chat_has_two_names():
    """Either may be given, and both where they say the same."""
    both = {"max_tokens": 5, "max_completion_tokens": 5}
    for fields in ({"max_tokens": 5}, {"max_completion_tokens": 5}, both):
        assert job(CHAT, **fields).params.generation.max_tokens == 5


def test_generation_choices_of_a_prompt_are_side_by_side():
    """Each prompt is there once for each of its choices; so is a conversation."""
    assert job(PLAIN, prompt=["a", "b"], n=2).inputs.texts == ["a", "a", "b", "b"]
    assert len(job(CHAT, n=3).inputs.chats) == 3


def test_generation_conversation_is_read_in_every_shape():
    """Text parts become lines, `developer` is the system, and an own answer may come back."""
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "audio": None},
        {"role": "user", "content": "d", "name": "ann"},
    ]
    (turns,) = job(CHAT, messages=messages).inputs.chats
    assert turns == [
        ChatMessage("system", "be brief"),
        ChatMessage("user", "a\nb"),
        ChatMessage("assistant", "c"),
        ChatMessage("user", "d", "ann"),
    ]
    assert job(NATIVE, messages=messages).inputs.chats == [turns]


def test_generation_formats_become_schemas():
    """`json_object` is any object, a schema travels as it is, and `text` is no schema."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    formats = {
        "text": {"type": "text"},
        "json_object": {"type": "json_object"},
        "json_schema": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": schema, "strict": True},
        },
    }
    made = {
        name: job(CHAT, response_format=wanted).params.generation.schema
        for name, wanted in formats.items()
    }
    assert made["text"] is None
    assert msgspec.json.decode(made["json_object"]) == {"type": "object"}
    assert msgspec.json.decode(made["json_schema"]) == schema
    assert msgspec.json.decode(job(NATIVE, schema=schema).params.generation.schema) == schema


NOTHING = {
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "functions": None,
    "logit_bias": {},
    "modalities": ["text"],
    "audio": None,
    "store": False,
    "user": "u",
    "metadata": {"a": "b"},
    "service_tier": "auto",
}


def test_generation_fields_that_ask_for_nothing_are_accepted():
    """What some clients always send is no fault where it asks for nothing."""
    plain = {"echo": False, "suffix": None, "best_of": 1, "logit_bias": {}, "user": "u"}
    for path, fields in ((CHAT, NOTHING), (PLAIN, plain)):
        made, bare = job(path, **fields), job(path)
        assert (made.inputs, made.params) == (bare.inputs, bare.params)


BAD = [
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [*HELLO, {"role": "user", "content": []}]}, "messages[1].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls",
    ),
    (CHAT, {"tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"logit_bias": {"5": 1}}, "logit_bias"),
    (CHAT, {"audio": {"voice": "x"}}, "audio"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"store": True}, "store"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": MAX_LOGPROBS + 1}, "top_logprobs"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    (
        CHAT,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"a": "x" * MAX_SCHEMA_BYTES}},
            }
        },
        "response_format",
    ),
    (CHAT, {"stop": ["x"] * (MAX_STOPS_OPENAI + 1)}, "stop"),
    (PLAIN, {"prompt": ""}, "prompt"),
    (PLAIN, {"prompt": []}, "prompt"),
    (PLAIN, {"prompt": ["a", ""]}, "prompt[1]"),
    (PLAIN, {"prompt": [1, 2]}, "prompt"),
    (PLAIN, {"prompt": [[1], [2]]}, "prompt"),
    (PLAIN, {"echo": True}, "echo"),
    (PLAIN, {"suffix": "x"}, "suffix"),
    (PLAIN, {"best_of": 2}, "best_of"),
    (PLAIN, {"prompt": ["a"] * 200, "n": MAX_CHOICES}, "n"),
    (NATIVE, {"inputs": None}, "inputs"),
    (NATIVE, {"inputs": "x", "messages": HELLO}, "messages"),
    (NATIVE, {"top_k": 0}, "top_k"),
    (NATIVE, {"schema": "x"}, "schema"),
    (NATIVE, {"stop": ["x"] * (MAX_STOPS + 1)}, "stop"),
    *[
        (path, {field: value}, param)
        for path in ROUTES
        for field, value, param in [
            ("max_tokens", 0, "max_tokens"),
            ("temperature", 2.5, "temperature"),
            ("top_p", 0, "top_p"),
            ("n", 0, "n"),
            ("n", MAX_CHOICES + 1, "n"),
            ("seed", 2**63, "seed"),
            ("frequency_penalty", 3, "frequency_penalty"),
            ("stop", "", "stop"),
            ("stop", ["x", ""], "stop[1]"),
            ("stop", "x" * (MAX_STOP_CHARS + 1), "stop"),
            ("temperatur", 1, "temperatur"),
            ("model", "dense", "model"),
            ("model", "writre", "model"),
        ]
    ],
]


@pytest.mark.parametrize(("path", "fields", "param"), BAD)
def test_generation_bad_request_names_the_field(path, fields, param):
    """What cannot be served is refused, with the name of the field at fault."""
    with pytest.raises(ShoalError) as refused:
        job(path, **fields)
    assert refused.value.param == param
    assert refused.value.http_status in (400, 404)


def test_generation_schema_that_is_no_json_is_refused():
    """MessagePack can carry what no JSON schema can hold."""
    odd = {"enum": [msgspec.msgpack.Ext(5, b"x")]}
    packed = MSGPACK.encode({"model": "writer", "inputs": "x", "schema": odd})
    with pytest.raises(InvalidRequest) as refused:
        ROUTES[NATIVE].job(ROUTES[NATIVE].reader.read(packed, MSGPACK), asked())
    assert refused.value.param == "schema"


def test_generation_conversation_has_a_bound():
    """The characters of all messages together are those of one input."""
    most = 100
    messages = [{"role": "user", "content": "x" * 30}] * 4
    with pytest.raises(InvalidRequest) as refused:
        chat.chat_job(body(CHAT, messages=messages), asked(max_input_chars=most))
    assert refused.value.param == "messages"


def test_generation_faults_of_workers_get_the_names_of_the_request():
    """What a worker calls `schema` or `inputs[3]` is what the caller called it."""
    request = body(CHAT, max_completion_tokens=5)
    assert chat.chat_field(request, "schema") == "response_format"
    assert chat.chat_field(request, "max_tokens") == "max_completion_tokens"
    assert chat.chat_field(body(CHAT, max_tokens=5), "max_tokens") == "max_tokens"
    assert chat.chat_field(request, "inputs[1]") == "messages"
    two = body(PLAIN, prompt=["a", "b"], n=2)
    assert completions.completion_field(two, "inputs[3]") == "prompt[1]"
    assert completions.completion_field(body(PLAIN), "inputs[0]") == "prompt"
    assert completions.completion_field(two, "stop") == "stop"
    assert generate.native_field(body(NATIVE, inputs=["a"]), "inputs[0]") == "inputs[0]"
    assert generate.native_field(body(NATIVE, messages=HELLO), "inputs[0]") == "messages"


def test_generation_cost_is_what_is_read_and_what_may_be_expected():
    """A bound below the usual length counts as it is; a higher one, or none, as the usual."""
    usual = TextLengths().usual_tokens("writer@1")
    (short,), _ = costs(job(PLAIN, max_tokens=10), 1.0, usual)
    (long,), _ = costs(job(PLAIN, max_tokens=10_000), 1.0, usual)
    (unbounded,), _ = costs(job(NATIVE), 1.0, usual)
    assert short == len("hello") + 10
    assert long == unbounded == len("hello") + EXPECTED_TOKENS
    assert costs(job(CHAT, n=2), 1.0, usual)[0][0] > unbounded
    assert len(costs(job(CHAT, n=2), 1.0, usual)[0]) == 2


def test_generation_usual_length_is_learnt_of_each_model():
    """It comes near what a model's texts have, and follows when they change; models are apart."""
    lengths = TextLengths()
    for tokens in (40, 400):
        for _ in range(200):
            lengths.learn("a@1", text(tokens=tokens))
        assert lengths.usual_tokens("a@1") == tokens
    assert lengths.usual_tokens("b@1") == EXPECTED_TOKENS


def test_generation_usual_length_is_not_that_of_texts_cut_short():
    """Texts that end at their bound below the usual length leave it; above, they raise it."""
    lengths = TextLengths()
    lengths.learn("a@1", text(tokens=100))
    usual = lengths.usual_tokens("a@1")
    lengths.learn("a@1", text(tokens=5, finish_reason="length"))
    assert lengths.usual_tokens("a@1") == usual
    lengths.learn("a@1", text(tokens=5_000, finish_reason="length"))
    assert lengths.usual_tokens("a@1") > usual


def test_generation_usual_lengths_are_kept_of_so_many_models():
    """Beyond the bound the model is forgotten of which nothing has come for longest."""
    lengths = TextLengths()
    for n in range(MAX_LEARNT):
        lengths.learn(f"m{n}", text(tokens=10))
    lengths.learn("m0", text(tokens=10))
    lengths.learn("one more", text(tokens=10))
    assert len(lengths) == MAX_LEARNT
    assert lengths.usual_tokens("m0") == 10
    assert lengths.usual_tokens("m1") == EXPECTED_TOKENS


def test_generation_readers_take_both_forms():
    """Every request can be sent in MessagePack."""
    for path, route in ROUTES.items():
        request = body(path, stop=["x"], n=2)
        assert Reader(route.reader.kind).read(MSGPACK.encode(request), MSGPACK) == request
