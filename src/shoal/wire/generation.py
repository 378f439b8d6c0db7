"""What `generate` is asked for, and what it gives: as one whole, and in pieces as it grows.

Owns the structs and the codec of the whole; a `Result` carries it as its record. Does not own how
anything is generated, or the HTTP shape of a request or an answer.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from shoal.errors import Bug

FinishReason = Literal["stop", "length", "cancelled"]


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of a conversation; the model's chat template puts it into the prompt."""

    role: str
    content: str
    name: str | None = None


class Generation(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a text is continued. None leaves a setting to the model's own files, else to its engine.

    max_tokens: of the continuation; None: up to the end of the context. temperature: 0 takes the
    likeliest token each time. stop: texts that end the continuation and are not part of it. n: how
    many continuations each input gets; each is an item of its own, and the input at `i` is choice
    `i % n`. seed: of the first choice; each further one counts one up. logprobs: report the log
    probability of each token, and of so many likeliest ones besides. schema: a JSON schema that
    the continuation has to fit, as JSON text. stream: send pieces as they come.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop: list[str] = []
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    schema: str | None = None
    stream: bool = False


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token with the natural logarithm of its probability; top: the likeliest in its place."""

    token: str
    logprob: float
    top: list[tuple[str, float]] = []


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a text has grown by. tokens: how many that took."""

    text: str = ""
    tokens: int = 0
    logprobs: list[TokenLogprob] = []


class Generated(msgspec.Struct, frozen=True, omit_defaults=True):
    """A whole continuation.

    finish_reason: `stop` at the model's own end or at a stop text, `length` at `max_tokens` or at
    the end of the context, `cancelled` where it was told to stop. prompt_tokens, tokens: read and
    generated. first_token_s: from its start to its first token. token_s: mean time of each further
    one; 0 where there is none.
    """

    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    tokens: int
    first_token_s: float = 0.0
    token_s: float = 0.0
    logprobs: list[TokenLogprob] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Generated).decode


def pack(generated: Generated) -> msgspec.Raw:
    """A continuation as it stands in a `Result`."""
    return msgspec.Raw(_encode(generated))


def unpack(data: msgspec.Raw) -> Generated:
    """The continuation again. Raises `Bug`: only a worker of ours can have written it."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Bug(f"a continuation cannot be read: {error}") from error
