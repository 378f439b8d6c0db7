"""`/v1/completions` in the shape of OpenAI's API, whole and streamed.

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
from shoal.gateway.ask import Ask, TextsOrIds
from shoal.gateway.chat import ResponseFormat, schema_of
from shoal.gateway.forms import Form
from shoal.gateway.generation import (
    MAX_STOPS_OPENAI,
    GenerationUsage,
    Logprobs,
    Sampling,
    Tokens,
    Unserved,
    Unused,
    finite,
    generate_job,
    generation,
    refuse,
    usage_of,
    wholes,
)
from shoal.gateway.jobs import Answer, Job
from shoal.gateway.openai_chunks import OpenAITelling, StreamOptions, check_options
from shoal.wire.generation import Generated, Piece, TokenLogprob

# As in OpenAI's API, whose users expect a short answer where they set no bound.
DEFAULT_TOKENS: Final = 16
_UNSERVED: Final[dict[str, tuple[Any, ...]]] = {
    "echo": (None, False),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
}


class CompletionRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions."""

    prompt: Annotated[TextsOrIds, Meta(description="A text, or a list of texts, to be continued.")]
    max_tokens: Annotated[
        Tokens | None,
        Meta(description=f"Most tokens to generate of each text; null, too, is {DEFAULT_TOKENS}."),
    ] = DEFAULT_TOKENS
    logprobs: Annotated[
        Logprobs | None,
        Meta(description="Report each token, and so many of the likeliest in its place."),
    ] = None
    best_of: Annotated[int | None, Meta(description="Only the value of `n`.")] = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    user: Unused = None
    echo: Unserved = None
    suffix: Unserved = None
    logit_bias: Unserved = None


class CompletionLogprobs(msgspec.Struct):
    """The tokens of a text, and where each begins in it, in characters."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One of the continuations, or what it has grown by; those of a prompt are side by side."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/completions, and each event of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: GenerationUsage | UnsetType | None = UNSET


def completion_job(body: CompletionRequest, ask: Ask) -> Job:
    """The job that a request asks for."""
    entry = ask.entry(body.model, "generate")
    refuse(body, _UNSERVED)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("`best_of` is not served here: leave it out", param="best_of")
    check_options(body.stream_options, stream=bool(body.stream))
    asked = generation(
        body,
        entry,
        max_tokens=DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens,
        max_stops=MAX_STOPS_OPENAI,
        logprobs=body.logprobs,
        schema=schema_of(body.response_format),
    )
    inputs = ask.texts_or_ids(body.prompt, "prompt")
    if inputs.ids:
        raise InvalidRequest("`prompt` has token ids; only texts are served", param="prompt")
    return generate_job(ask, entry, inputs, asked)


def completion_field(body: CompletionRequest, name: str) -> str:
    """The field that holds what workers call `name`."""
    if name == "schema":
        return "response_format"
    return prompt_field(name, body.prompt, "prompt", body.n or 1)


def prompt_field(name: str, prompts: object, field: str, n: int) -> str:
    """`inputs[7]` as the prompt of the caller that it is a choice of; other names as they are."""
    if not name.startswith(("inputs", "prompt")):
        return name
    number = name.partition("[")[2].partition("]")[0]
    if isinstance(prompts, str) or not number.isdecimal():
        return field
    return f"{field}[{int(number) // n}]"


def completion_answer(body: CompletionRequest, job: Job, answer: Answer, form: Form) -> Completion:
    """The answer in OpenAI's shape."""
    del form
    texts = wholes(job, answer)
    choices = [
        CompletionChoice(
            i,
            one.text,
            None if body.logprobs is None else _logprobs(one.logprobs, 0),
            one.finish_reason,
        )
        for i, one in enumerate(texts)
    ]
    return Completion(
        id=f"cmpl-{job.request_id}",
        created=int(wall()),
        model=job.model,
        choices=choices,
        usage=usage_of(job, texts),
    )


def _logprobs(tokens: Sequence[TokenLogprob], offset_chars: int) -> CompletionLogprobs:
    offsets = []
    for one in tokens:
        offsets.append(offset_chars)
        offset_chars += len(one.token)
    return CompletionLogprobs(
        [one.token for one in tokens],
        [finite(one.logprob) for one in tokens],
        [{token: finite(p) for token, p in one.top} for one in tokens],
        offsets,
    )


class CompletionTelling(OpenAITelling[Completion, CompletionChoice]):
    """A streamed completion in OpenAI's chunks."""

    def __init__(self, body: CompletionRequest, job: Job) -> None:
        super().__init__(Completion, f"cmpl-{job.request_id}", job, body.stream_options)
        self._logprobs = body.logprobs is not None
        self._offsets_chars: dict[int, int] = {}

    def piece(self, index: int, piece: Piece) -> Sequence[Completion]:
        """A chunk; none where nothing is certain yet."""
        if not piece.text and not piece.logprobs:
            return []
        choice = CompletionChoice(index, piece.text)
        if self._logprobs:
            at = self._offsets_chars.get(index, 0)
            choice.logprobs = _logprobs(piece.logprobs, at)
            self._offsets_chars[index] = at + sum(len(one.token) for one in piece.logprobs)
        return [self.chunk([choice])]

    def end(self, index: int, generated: Generated) -> Sequence[Completion]:
        """A chunk with the reason."""
        return [self.chunk([CompletionChoice(index, "", None, generated.finish_reason)])]
