"""The native route of texts: `/v1/generate`, whole and streamed.

Owns its fields, answers and events. Does not own the fields that all generating routes have
(`generation`) or sending events (`stream`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from shoal.errors import InvalidRequest
from shoal.gateway.ask import Ask
from shoal.gateway.completions import prompt_field
from shoal.gateway.forms import Form
from shoal.gateway.generation import (
    MAX_STOPS,
    GenerationUsage,
    Logprobs,
    Sampling,
    Schema,
    Turns,
    conversation,
    finite,
    generate_job,
    generation,
    schema_text,
    usage_of,
    wholes,
)
from shoal.gateway.jobs import Answer, Job
from shoal.wire.envelope import Inputs
from shoal.wire.generation import Generated, Piece, TokenLogprob


class GenerateRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/generate: `inputs` or `messages`."""

    inputs: Annotated[
        str | list[str] | None, Meta(description="A text, or a list of texts, to be continued.")
    ] = None
    messages: Turns | None = None
    top_k: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Only so many of the likeliest tokens.")
    ] = None
    logprobs: Annotated[
        Logprobs | None,
        Meta(description="Report each token, and so many of the likeliest in its place."),
    ] = None
    schema: Schema | None = None


class TokenFound(msgspec.Struct):
    """A token of the text, and the likeliest in its place with their logarithms."""

    token: str
    logprob: float
    top: list[tuple[str, float]]


class GeneratedText(msgspec.Struct, omit_defaults=True):
    """One continuation; those of an input are side by side. In the last event without its text."""

    index: int
    finish_reason: Annotated[
        str, Meta(description="`stop`: at its own end or a stop text; `length`: at the bound.")
    ]
    tokens: Annotated[int, Meta(description="How many were generated.")]
    text: str | UnsetType = UNSET
    logprobs: list[TokenFound] | UnsetType = UNSET


class GenerateResponse(msgspec.Struct):
    """Answer of POST /v1/generate, and the last event of a streamed one."""

    model: str
    data: list[GeneratedText]
    usage: GenerationUsage


class GeneratePiece(msgspec.Struct, omit_defaults=True):
    """An event of a streamed POST /v1/generate: what a text has grown by.

    The last event is a `GenerateResponse` without the texts.
    """

    index: int
    text: str
    logprobs: list[TokenFound] | UnsetType = UNSET


def native_job(body: GenerateRequest, ask: Ask) -> Job:
    """The job that a request asks for."""
    entry = ask.entry(body.model, "generate")
    if body.inputs is not None and body.messages is not None:
        raise InvalidRequest("give `inputs` or `messages`, not both", param="messages")
    asked = generation(
        body,
        entry,
        max_tokens=body.max_tokens,
        max_stops=MAX_STOPS,
        logprobs=body.logprobs,
        schema=schema_text(body.schema, "schema"),
        top_k=body.top_k,
    )
    if body.messages is not None:
        inputs = Inputs(chats=[conversation(ask, body.messages)])
    elif body.inputs is None:
        raise InvalidRequest("`inputs` is required", param="inputs")
    elif isinstance(body.inputs, str):
        inputs = Inputs(texts=[ask.text(body.inputs, "inputs")])
    else:
        inputs = Inputs(texts=ask.texts(body.inputs, "inputs"))
    return generate_job(ask, entry, inputs, asked)


def native_field(body: GenerateRequest, name: str) -> str:
    """The field that holds what workers call `name`."""
    if body.messages is not None:
        return "messages" if name.startswith(("inputs", "prompt")) else name
    return prompt_field(name, body.inputs, "inputs", body.n or 1)


def native_answer(body: GenerateRequest, job: Job, answer: Answer, form: Form) -> GenerateResponse:
    """The texts, with the numbers."""
    del form
    texts = wholes(job, answer)
    response = GenerateResponse(job.model, _numbers(texts), usage_of(job, texts))
    for found, one in zip(response.data, texts, strict=True):
        found.text = one.text
        if body.logprobs is not None:
            found.logprobs = _logprobs(one.logprobs)
    return response


def _numbers(texts: Sequence[Generated]) -> list[GeneratedText]:
    return [GeneratedText(i, one.finish_reason, one.tokens) for i, one in enumerate(texts)]


def _logprobs(tokens: Sequence[TokenLogprob]) -> list[TokenFound]:
    return [
        TokenFound(one.token, finite(one.logprob), [(t, finite(p)) for t, p in one.top])
        for one in tokens
    ]


class NativeTelling:
    """A streamed answer: pieces, and at the end the numbers of all texts."""

    done = b""

    def __init__(self, body: GenerateRequest, job: Job) -> None:
        self._job = job
        self._logprobs = body.logprobs is not None

    def piece(self, index: int, piece: Piece) -> Sequence[msgspec.Struct]:
        """What a text has grown by; none where nothing is certain yet."""
        if not piece.text and not piece.logprobs:
            return []
        grown = GeneratePiece(index, piece.text)
        if self._logprobs:
            grown.logprobs = _logprobs(piece.logprobs)
        return [grown]

    def end(self, index: int, generated: Generated) -> Sequence[msgspec.Struct]:
        """Nothing: the last event has the numbers of all."""
        del index, generated
        return []

    def last(self, texts: Sequence[Generated]) -> Sequence[msgspec.Struct]:
        """The answer without the texts, which have been sent."""
        return [GenerateResponse(self._job.model, _numbers(texts), usage_of(self._job, texts))]
