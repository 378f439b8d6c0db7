"""One call from first try to answer: when to send, when to wait, when to give up.

Owns retries, their bounds and the mapping of failures to `shoal.errors`. Sans-io: a generator that
yields what is to be done and is told how it went, so that both clients drive the same one. Does not
own what a call means (`core`) or the sending (`shells`).
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import msgspec

from shoal import errors
from shoal.errors import DeadlineExceeded, ShoalError, Unreachable, from_code

MSGPACK: Final = "application/msgpack"
# The server's own deadline should fire first: its answer says why.
GRACE_S: Final = 2.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reply:
    """How it went: an answer. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request to make.

    parse: reads an answer whose status is in `good`.
    deadline_s: what the server is told; None means the time that is left to the client.
    idempotency_key: `auto` makes one for the call. All tries have the same.
    retry: whether another try may be made; every call of Shoal can safely be repeated.
    """

    method: str
    path: str
    parse: Callable[[Reply], T]
    body: Mapping[str, Any] | None = None
    timeout_s: float | None = None
    deadline_s: float | None = None
    lane: str | None = None
    idempotency_key: str | None = None
    retry: bool = True
    good: tuple[int, ...] = (200,)


@dataclass(frozen=True, slots=True)
class Policy:
    """How long and how often. A wait is `backoff_s * 2**n`, half of it by chance."""

    timeout_s: float = 60.0
    max_retries: int = 4
    backoff_s: float = 0.1
    max_backoff_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Send:
    """To do: send this, and wait at most `timeout_s`."""

    method: str
    path: str
    headers: dict[str, str]
    content: bytes | None
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Sleep:
    """To do: wait."""

    for_s: float


@dataclass(frozen=True, slots=True)
class Lost:
    """How it went: no answer."""

    why: str
    timed_out: bool = False


def exchange(
    call: Call[T], policy: Policy, clock: Callable[[], float], rng: random.Random
) -> Generator[Send | Sleep, Reply | Lost | None, T]:
    """Drives a call. Answer `Send` with a `Reply` or a `Lost`, and `Sleep` with None.

    clock: seconds, monotonic. Raises a `ShoalError` when no more tries are left, or none would end
    within the time.
    """
    end_s = clock() + (policy.timeout_s if call.timeout_s is None else call.timeout_s)
    content = None if call.body is None else msgspec.msgpack.encode(call.body)
    key = uuid.uuid4().hex if call.idempotency_key == "auto" else call.idempotency_key
    n_failed = 0
    while True:
        left_s = end_s - clock()
        outcome = yield Send(
            call.method,
            call.path,
            _headers(call, left_s, key),
            content,
            max(left_s, 0.0) + GRACE_S,
        )
        if isinstance(outcome, Reply):
            if outcome.status in call.good:
                return call.parse(outcome)
            error = error_of(outcome)
        else:
            error = lost_error(outcome)
        n_failed += 1
        wait_s = _wait_s(error, n_failed, policy, rng)
        if (
            not call.retry
            or n_failed > policy.max_retries
            or not _worth_a_retry(error)
            or clock() + wait_s >= end_s
        ):
            raise error
        yield Sleep(wait_s)


def _headers(call: Call[Any], left_s: float, key: str | None) -> dict[str, str]:
    headers = {"accept": MSGPACK}
    if call.method == "POST":
        deadline_s = left_s if call.deadline_s is None else min(call.deadline_s, left_s)
        headers["content-type"] = MSGPACK
        headers["x-shoal-deadline-ms"] = f"{max(deadline_s, 0.001) * 1e3:.0f}"
        if call.lane is not None:
            headers["x-shoal-lane"] = call.lane
        if key is not None:
            headers["idempotency-key"] = key
    return headers


def _worth_a_retry(error: ShoalError) -> bool:
    return error.retryable and error.http_status in (429, 503)


def _wait_s(error: ShoalError, n_failed: int, policy: Policy, rng: random.Random) -> float:
    """The server's word, or a growing pause; some chance keeps many clients from one beat."""
    longest_s = min(policy.max_backoff_s, policy.backoff_s * 2.0 ** (n_failed - 1))
    pause_s = longest_s * rng.uniform(0.5, 1.0)
    return pause_s + (error.retry_after_s or 0.0)


def lost_error(outcome: Lost | None) -> ShoalError:
    """The error of an answer that did not come, or not to its end."""
    if outcome is not None and outcome.timed_out:
        return DeadlineExceeded(f"no answer in time: {outcome.why}")
    return Unreachable(f"no answer: {outcome.why if outcome else 'nothing was sent'}")


class _Error(msgspec.Struct):
    code: str
    message: str
    param: str | None = None
    request_id: str | None = None


_BY_STATUS: Final[dict[int, type[ShoalError]]] = {
    401: errors.Unauthorized,
    404: errors.NotFound,
    405: errors.MethodNotAllowed,
    408: errors.RequestTimeout,
    413: errors.PayloadTooLarge,
    415: errors.UnsupportedMedia,
    429: errors.QueueFull,
    503: errors.CapacityError,
    504: errors.DeadlineExceeded,
}


def error_of(reply: Reply) -> ShoalError:
    """The error that an answer tells of; its note has the request id."""
    after_s = _retry_after_s(reply.headers.get("retry-after"))
    told = _told(reply)
    if told is None:  # something between us and the server answered
        kind = _BY_STATUS.get(reply.status)
        if kind is None:
            kind = errors.InvalidRequest if reply.status < 500 else errors.Bug
        text = reply.content[:200].decode("utf-8", "replace")
        return kind(f"HTTP {reply.status}: {text}", retry_after_s=after_s)
    error = from_code(told.code, told.message, param=told.param, retry_after_s=after_s)
    if told.request_id:
        error.add_note(f"request id: {told.request_id}")
    return error


def _told(reply: Reply) -> _Error | None:
    packed = MSGPACK in reply.headers.get("content-type", "")
    decode = msgspec.msgpack.decode if packed else msgspec.json.decode
    try:
        told = decode(reply.content, type=dict[str, Any])
        return msgspec.convert(told.get("error", told), _Error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _retry_after_s(header: str | None) -> float | None:
    """Seconds; the other form of the header, a date, is passed over."""
    try:
        after_s = float(header) if header is not None else -1.0
    except ValueError:
        return None
    return after_s if 0 <= after_s < 3600 else None
