"""What the routes that generate have in common: fields, checks, conversations and counts.

Owns the fields that say how a text is continued, what of OpenAI's API is refused rather than
ignored, and turning a conversation into turns. Does not own the shape of any one request or answer
(`chat`, `completions`, `generate`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from shoal.catalog.schema import Entry, Temperature, TopP
from shoal.errors import Bug, InputTooLong, InvalidRequest
from shoal.gateway.ask import Ask, ModelName
from shoal.gateway.growth import whole
from shoal.gateway.jobs import Answer, Job
from shoal.wire.envelope import Inputs, Params
from shoal.wire.generation import ChatMessage, Generated, Generation

MAX_CHOICES: Final = 16
MAX_STOPS: Final = 16
MAX_STOPS_OPENAI: Final = 4
MAX_STOP_CHARS: Final = 256
MAX_LOGPROBS: Final = 20
MAX_SCHEMA_BYTES: Final = 65_536
# Engines take seeds from 0 up to 63 bits, and each further choice counts one up.
_SEEDS: Final = 2**62
# What stands for a logarithm of zero in an answer, as in OpenAI's.
_LEAST_LOGPROB: Final = -9999.0

Tokens = Annotated[
    int,
    Meta(ge=1, description="Most tokens to generate; the end of the context is a bound, too."),
]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Schema = Annotated[dict[str, Any], Meta(description="JSON schema that the text has to fit.")]
Unused = Annotated[Any, Meta(description="Accepted for compatibility; not used.")]
Unserved = Annotated[Any, Meta(description="Not served: only a value that asks for nothing.")]


class Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of all routes that generate; null leaves a setting to the model."""

    model: ModelName
    max_tokens: Tokens | None = None
    temperature: Temperature = None
    top_p: TopP = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    stop: Annotated[
        str | list[str] | None,
        Meta(description="Texts that end the continuation; they are not part of it."),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None,
        Meta(description="The same seed and request give the same text, as far as the engine can."),
    ] = None
    n: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None,
        Meta(description="Continuations of each prompt."),
    ] = None
    stream: Annotated[
        bool | None, Meta(description="Send the text while it grows, as server-sent events.")
    ] = None


class GenerationUsage(msgspec.Struct):
    """Tokens read, of each prompt once, and generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


def generation(
    body: Sampling,
    entry: Entry,
    *,
    max_tokens: int | None,
    max_stops: int,
    logprobs: int | None = None,
    schema: str | None = None,
    top_k: int | None = None,
) -> Generation:
    """How the texts are to go on. Raises `InvalidRequest` that names the field."""
    return Generation(
        max_tokens=None if max_tokens is None else min(max_tokens, entry.max_tokens),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=top_k,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        stop=_stops(body.stop, max_stops),
        seed=None if body.seed is None else body.seed % _SEEDS,
        n=body.n or 1,
        logprobs=logprobs,
        schema=schema,
        stream=bool(body.stream),
    )


def _stops(stop: str | Sequence[str] | None, max_stops: int) -> list[str]:
    if stop is None:
        return []
    one = isinstance(stop, str)
    stops = [stop] if isinstance(stop, str) else list(stop)
    if len(stops) > max_stops:
        raise InvalidRequest(
            f"`stop` has {len(stops)} texts; at most {max_stops} are allowed", param="stop"
        )
    for i, text in enumerate(stops):
        name = "stop" if one else f"stop[{i}]"
        if not text:
            raise InvalidRequest(f"`{name}` is an empty string", param=name)
        if len(text) > MAX_STOP_CHARS:
            raise InvalidRequest(
                f"`{name}` has {len(text)} characters; at most {MAX_STOP_CHARS} are allowed",
                param=name,
            )
    return stops


def schema_text(schema: Mapping[str, Any] | None, field: str) -> str | None:
    """A schema as it travels. Raises `InvalidRequest`, with the field, where it is too large."""
    if schema is None:
        return None
    try:
        text = msgspec.json.encode(schema)
    except (TypeError, ValueError) as error:  # MessagePack has values that JSON has not
        raise InvalidRequest(f"the schema in `{field}` is no JSON: {error}", param=field) from error
    if len(text) > MAX_SCHEMA_BYTES:
        raise InvalidRequest(
            f"the schema in `{field}` has {len(text)} bytes; at most {MAX_SCHEMA_BYTES} are "
            "allowed",
            param=field,
        )
    return text.decode()


def generate_job(ask: Ask, entry: Entry, inputs: Inputs, asked: Generation) -> Job:
    """The job of all choices of all prompts, those of a prompt side by side."""
    n = asked.n
    texts = [text for text in inputs.texts for _ in range(n)]
    chats = [chat for chat in inputs.chats for _ in range(n)]
    if len(texts) > ask.limits.max_inputs:
        raise InvalidRequest(
            f"{len(inputs.texts)} prompts with {n} choices each are {len(texts)} texts; at most "
            f"{ask.limits.max_inputs} are allowed in one request",
            param="n",
        )
    return ask.job("generate", entry, Inputs(texts=texts, chats=chats), Params(generation=asked))


# --- conversations


class ContentPart(msgspec.Struct):
    """A part of a message's content; only texts are taken."""

    type: str
    text: str | None = None


class Turn(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message of a conversation. `developer` is another name of `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str | list[ContentPart],
        Meta(description="A text, or parts of type `text`, which are put on lines of their own."),
    ]
    name: str | None = None
    # What OpenAI's clients have in a message that they got as an answer.
    refusal: Unserved = None
    annotations: Unserved = None
    audio: Unserved = None
    tool_calls: Unserved = None
    function_call: Unserved = None


Turns = Annotated[list[Turn], Meta(description="The conversation so far, oldest first.")]
_NOTHING: Final[tuple[Any, ...]] = (None, [], {}, "", False)


def refuse(body: msgspec.Struct, fields: Mapping[str, tuple[Any, ...]], at: str = "") -> None:
    """Raises `InvalidRequest` for a field that asks for what is not served.

    fields: by name the values that ask for nothing. at: where the body stands in its request.
    """
    for field, nothing in fields.items():
        value = getattr(body, field)
        if not any(value == each and type(value) is type(each) for each in nothing):
            name = at + field
            raise InvalidRequest(f"`{name}` is not served here: leave it out", param=name)


_TURN_UNSERVED: Final = dict.fromkeys(
    ("refusal", "annotations", "audio", "tool_calls", "function_call"), _NOTHING
)


def conversation(ask: Ask, turns: Sequence[Turn]) -> list[ChatMessage]:
    """The turns, checked. Raises `InvalidRequest`; `InputTooLong` for all of them together."""
    if not turns:
        raise InvalidRequest("`messages` is empty", param="messages")
    ask.count(turns, "messages")
    messages = []
    for i, turn in enumerate(turns):
        at = f"messages[{i}]"
        refuse(turn, _TURN_UNSERVED, f"{at}.")
        role = "system" if turn.role == "developer" else turn.role
        messages.append(ChatMessage(role, _content(turn.content, f"{at}.content"), turn.name))
    chars = sum(len(message.content) for message in messages)
    if chars > ask.limits.max_input_chars:
        raise InputTooLong(
            f"`messages` has {chars} characters; at most {ask.limits.max_input_chars} are allowed",
            param="messages",
        )
    return messages


def _content(content: str | Sequence[ContentPart], at: str) -> str:
    if isinstance(content, str):
        return content
    if not content:
        raise InvalidRequest(f"`{at}` is empty", param=at)
    for i, part in enumerate(content):
        name = f"{at}[{i}]"
        if part.type != "text":
            raise InvalidRequest(
                f"`{name}` is of type `{part.type[:50]}`; only parts of type `text` are served",
                param=name,
            )
        if part.text is None:
            raise InvalidRequest(f"`{name}.text` is required", param=f"{name}.text")
    return "\n".join(part.text or "" for part in content)


# --- answers


def wholes(job: Job, answer: Answer) -> list[Generated]:
    """The continuations, those of a prompt side by side. Raises `Bug`, `RuntimeCrashed`."""
    sent = len(job.inputs.texts) or len(job.inputs.chats)
    if len(answer.result.records) != sent:
        raise Bug(f"{len(answer.result.records)} continuations for {sent} prompts")
    return [whole(record) for record in answer.result.records]


def usage_of(job: Job, texts: Iterable[Generated]) -> GenerationUsage:
    """What was read and generated. texts: in the order of the job's inputs."""
    n = 1 if job.params.generation is None else job.params.generation.n
    all_ = list(texts)
    read = sum(one.prompt_tokens for one in all_[::n])
    generated = sum(one.tokens for one in all_)
    return GenerationUsage(read, generated, read + generated)


def finite(logprob: float) -> float:
    """A logarithm that JSON can hold."""
    return max(_LEAST_LOGPROB, logprob)
