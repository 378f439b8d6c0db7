"""Errors as HTTP answers: the shape of OpenAI's API on its routes, a flat one on the others.

Owns both shapes and `Retry-After`. Does not own which error is whose fault (`shoal.errors`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from shoal.errors import CallerError, Overloaded, QueueFull, ShoalError, Unauthorized
from shoal.wire.envelope import Failure

Shape = Literal["openai", "native"]


class NativeError(msgspec.Struct):
    """Body of every answer that is an error."""

    code: str
    message: str
    param: str | None
    request_id: str


class OpenAIErrorBody(msgspec.Struct):
    """What is wrong, in the words of OpenAI's API."""

    message: str
    type: str
    param: str | None
    code: str
    request_id: str


class OpenAIError(msgspec.Struct):
    """Body of every answer that is an error."""

    error: OpenAIErrorBody


class InputError(msgspec.Struct):
    """Why one input has no answer, while others have theirs."""

    index: int
    code: str
    message: str
    param: str | None


def input_errors(failures: Mapping[int, Failure]) -> dict[int, InputError]:
    """The failures as they stand in an answer, by the input's index."""
    return {
        at: InputError(at, failures[at].code, failures[at].message, failures[at].param)
        for at in sorted(failures)
    }


def error_body(error: ShoalError, shape: Shape, request_id: str) -> NativeError | OpenAIError:
    """The body that tells a client of an error."""
    if shape == "native":
        return NativeError(error.code, error.message, error.param, request_id)
    return OpenAIError(
        OpenAIErrorBody(error.message, _type(error), error.param, error.code, request_id)
    )


def error_headers(error: ShoalError) -> list[tuple[bytes, bytes]]:
    """`Retry-After` in whole seconds, at least 1, where another try may succeed."""
    if error.http_status not in (429, 503):
        return []
    after_s = max(1, math.ceil(error.retry_after_s or 1.0))
    return [(b"retry-after", str(after_s).encode())]


def _type(error: ShoalError) -> str:
    if isinstance(error, QueueFull | Overloaded):
        return "rate_limit_error"
    if isinstance(error, Unauthorized):
        return "authentication_error"
    return "invalid_request_error" if isinstance(error, CallerError) else "server_error"
