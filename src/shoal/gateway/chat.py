"""`/v1/chat/completions` in the shape of OpenAI's API, whole and streamed.

Owns its fields, answers and events. Does not own the fields that all generating routes have
(`generation`) or sending events (`stream`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from shoal.clock import wall
from shoal.errors import InvalidRequest
from shoal.gateway.ask import Ask
from shoal.gateway.forms import Form
from shoal.gateway.generation import (
    MAX_STOPS_OPENAI,
    GenerationUsage,
    Logprobs,
    Sampling,
    Schema,
    Tokens,
    Turns,
    Unserved,
    Unused,
    conversation,
    finite,
    generate_job,
    generation,
    refuse,
    schema_text,
    usage_of,
    wholes,
)
from shoal.gateway.jobs import Answer, Job
from shoal.gateway.openai_chunks import OpenAITelling, StreamOptions, check_options
from shoal.wire.envelope import Inputs
from shoal.wire.generation import Generated, Piece, TokenLogprob

_UNSERVED: Final[dict[str, tuple[Any, ...]]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "logit_bias": (None, {}),
    "modalities": (None, [], ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
}


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema with a name; it is always kept to, whatever `strict` says."""

    name: Annotated[str, Meta(max_length=64)]
    schema: Schema | None = None
    description: Unused = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the text has to be: anything, a JSON object, or JSON that fits a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions."""

    messages: Turns
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[
        Logprobs | None, Meta(description="So many of the likeliest tokens in each place.")
    ] = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    user: Unused = None
    metadata: Unused = None
    safety_identifier: Unused = None
    prompt_cache_key: Unused = None
    tools: Unserved = None
    tool_choice: Unserved = None
    parallel_tool_calls: Unserved = None
    functions: Unserved = None
    function_call: Unserved = None
    logit_bias: Unserved = None
    modalities: Unserved = None
    audio: Unserved = None
    prediction: Unserved = None
    reasoning_effort: Unserved = None
    verbosity: Unserved = None
    web_search_options: Unserved = None
    service_tier: Unserved = None
    store: Unserved = None


class TopLogprob(msgspec.Struct):
    """A token that was likely in a place. bytes: its UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    """A token of the text, and the likeliest in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The tokens of the text."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatAnswer(msgspec.Struct, kw_only=True):
    """The message that continues the conversation."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One of the continuations."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: GenerationUsage


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """What a message has grown by; the first of each choice has its role."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """One of the continuations."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """An event of a streamed POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: GenerationUsage | UnsetType | None = UNSET


def chat_job(body: ChatRequest, ask: Ask) -> Job:
    """The job that a request asks for."""
    entry = ask.entry(body.model, "generate")
    refuse(body, _UNSERVED)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
    check_options(body.stream_options, stream=bool(body.stream))
    asked = generation(
        body,
        entry,
        max_tokens=_most_tokens(body),
        max_stops=MAX_STOPS_OPENAI,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        schema=schema_of(body.response_format),
    )
    return generate_job(ask, entry, Inputs(chats=[conversation(ask, body.messages)]), asked)


def _most_tokens(body: ChatRequest) -> int | None:
    """The bound, which has an old name and a new one."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"`max_tokens` is {old} and `max_completion_tokens` is {new}: give one of them",
            param="max_tokens",
        )
    return old if new is None else new


def schema_of(wanted: ResponseFormat | None) -> str | None:
    """The schema, as JSON text, that a text has to fit; None where it may be anything."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return '{"type":"object"}'
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        name = "response_format.json_schema" + ("" if wanted.json_schema is None else ".schema")
        raise InvalidRequest(f"`{name}` is required", param=name)
    return schema_text(wanted.json_schema.schema, "response_format")


def chat_field(body: ChatRequest, name: str) -> str:
    """The field that holds what workers call `name`."""
    if name == "schema":
        return "response_format"
    if name == "max_tokens" and body.max_completion_tokens is not None:
        return "max_completion_tokens"
    return "messages" if name.startswith(("inputs", "prompt", "chat")) else name


def chat_answer(body: ChatRequest, job: Job, answer: Answer, form: Form) -> ChatCompletion:
    """The answer in OpenAI's shape."""
    del form
    texts = wholes(job, answer)
    choices = [
        ChatChoice(
            i,
            ChatAnswer(content=one.text),
            _logprobs(one.logprobs) if body.logprobs else None,
            one.finish_reason,
        )
        for i, one in enumerate(texts)
    ]
    return ChatCompletion(
        id=f"chatcmpl-{job.request_id}",
        created=int(wall()),
        model=job.model,
        choices=choices,
        usage=usage_of(job, texts),
    )


def _logprobs(tokens: Sequence[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                one.token,
                finite(one.logprob),
                list(one.token.encode("utf-8", "replace")),
                [
                    TopLogprob(token, finite(p), list(token.encode("utf-8", "replace")))
                    for token, p in one.top
                ],
            )
            for one in tokens
        ]
    )


class ChatTelling(OpenAITelling[ChatChunk, ChatChunkChoice]):
    """A streamed chat in OpenAI's chunks."""

    def __init__(self, body: ChatRequest, job: Job) -> None:
        super().__init__(ChatChunk, f"chatcmpl-{job.request_id}", job, body.stream_options)
        self._logprobs = bool(body.logprobs)
        self._begun: set[int] = set()

    def piece(self, index: int, piece: Piece) -> Sequence[ChatChunk]:
        """A chunk; none where nothing is certain yet."""
        if not piece.text and not piece.logprobs:
            return []
        delta = ChatDelta(content=piece.text)
        if index not in self._begun:
            self._begun.add(index)
            delta.role = "assistant"
        logprobs = _logprobs(piece.logprobs) if self._logprobs else None
        return [self.chunk([ChatChunkChoice(index, delta, logprobs)])]

    def end(self, index: int, generated: Generated) -> Sequence[ChatChunk]:
        """A chunk with the reason, after one with the role where there was no text."""
        choices = []
        if index not in self._begun:
            choices.append(ChatChunkChoice(index, ChatDelta("assistant", "")))
        choices.append(ChatChunkChoice(index, ChatDelta(), None, generated.finish_reason))
        return [self.chunk([choice]) for choice in choices]
