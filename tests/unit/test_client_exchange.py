"""Retries of the client, driven without a socket or a sleep."""

from __future__ import annotations

import random

import msgspec
import pytest

from shoal.client.exchange import Call, Lost, Policy, Reply, Send, Sleep, error_of, exchange
from shoal.errors import (
    Bug,
    CapacityError,
    DeadlineExceeded,
    InvalidRequest,
    ModelUnavailable,
    QueueFull,
    UnknownModel,
    Unreachable,
)

PACKED = "application/msgpack"
GOOD = Reply(200, {}, b"ok")


def refused(status=429, code="queue_full", after=None, **more):
    headers = {"content-type": PACKED} | ({} if after is None else {"retry-after": after})
    body = {"code": code, "message": "no", "param": None, "request_id": "r-1"} | more
    return Reply(status, headers, msgspec.msgpack.encode(body))


class Drive:
    """Plays a server: gives the outcomes one after the other; time passes only in sleeps."""

    def __init__(self, *outcomes, policy=None, **call):
        self.now = 0.0
        self.sends: list[Send] = []
        self.sleeps: list[float] = []
        self._outcomes = list(outcomes)
        fields = {"method": "POST", "path": "/x", "parse": lambda reply: reply.content, "body": {}}
        self._call = Call(**(fields | call))
        self._policy = policy or Policy()

    def run(self):
        steps = exchange(self._call, self._policy, lambda: self.now, random.Random(1))
        outcome = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as done:
                return done.value
            if isinstance(step, Sleep):
                self.sleeps.append(step.for_s)
                self.now += step.for_s
                outcome = None
            else:
                self.sends.append(step)
                outcome = self._outcomes.pop(0)


def test_exchange_sends_once_when_all_is_well():
    """A good answer is parsed, with no wait."""
    drive = Drive(GOOD)
    assert drive.run() == b"ok"
    assert (len(drive.sends), drive.sleeps) == (1, [])


def test_exchange_waits_as_long_as_it_is_told():
    """Retry-After is a lower bound of the wait; some chance comes on top."""
    drive = Drive(refused(after="3"), GOOD)
    assert drive.run() == b"ok"
    assert 3.05 <= drive.sleeps[0] <= 3.1


def test_exchange_backs_off_without_a_word():
    """Without Retry-After waits double, up to a bound, each at least half of its bound."""
    policy = Policy(max_retries=6, backoff_s=1, max_backoff_s=4)
    drive = Drive(*[Lost("refused")] * 6, GOOD, policy=policy)
    assert drive.run() == b"ok"
    bounds = [1, 2, 4, 4, 4, 4]
    assert all(b / 2 <= s <= b for s, b in zip(drive.sleeps, bounds, strict=True))


def test_exchange_gives_up_after_max_retries():
    """The last error is raised once the tries are used up."""
    drive = Drive(*[refused()] * 3, policy=Policy(max_retries=2))
    with pytest.raises(QueueFull):
        drive.run()
    assert len(drive.sends) == 3


def test_exchange_never_waits_past_its_time():
    """A wait that would end after the timeout is not begun: the error comes at once."""
    drive = Drive(refused(after="30"), timeout_s=10)
    with pytest.raises(QueueFull) as full:
        drive.run()
    assert drive.sleeps == []
    assert full.value.retry_after_s == 30


def test_exchange_tells_the_server_what_is_left():
    """The deadline of each try is what remains of the time, or the caller's own if shorter."""
    drive = Drive(refused(after="4"), GOOD, timeout_s=10)
    drive.run()
    first, second = (float(send.headers["x-shoal-deadline-ms"]) for send in drive.sends)
    assert first == 10_000
    assert 5_900 <= second <= 6_000
    drive = Drive(GOOD, timeout_s=10, deadline_s=2.5, lane="bulk")
    drive.run()
    assert drive.sends[0].headers["x-shoal-deadline-ms"] == "2500"
    assert drive.sends[0].headers["x-shoal-lane"] == "bulk"


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_request", InvalidRequest),
        (404, "model_not_found", UnknownModel),
        (503, "model_unavailable", ModelUnavailable),
        (504, "deadline_exceeded", DeadlineExceeded),
        (500, "internal_error", Bug),
    ],
)
def test_exchange_does_not_repeat_what_would_fail_again(status, code, kind):
    """Only a full or absent server is tried again."""
    drive = Drive(refused(status, code))
    with pytest.raises(kind):
        drive.run()
    assert len(drive.sends) == 1


def test_exchange_repeats_after_a_lost_connection():
    """Work is idempotent, so a broken connection is tried again; a timeout is not."""
    drive = Drive(Lost("reset"), GOOD)
    assert drive.run() == b"ok"
    with pytest.raises(Unreachable):
        Drive(Lost("refused"), policy=Policy(max_retries=0)).run()
    with pytest.raises(DeadlineExceeded):
        Drive(Lost("read", timed_out=True)).run()


def test_exchange_without_retry_raises_at_once():
    """A call that says so is tried once."""
    with pytest.raises(Unreachable):
        Drive(Lost("refused"), retry=False).run()


def test_error_keeps_its_kind_field_and_request_id():
    """An error of the server is raised as its class, from either shape."""
    flat = error_of(refused(400, "input_too_long", param="inputs[1]"))
    assert (flat.code, flat.param, flat.message) == ("input_too_long", "inputs[1]", "no")
    assert flat.__notes__ == ["request id: r-1"]
    wrapped = Reply(404, {"content-type": "application/json"}, b"")
    body = b'{"error":{"message":"m","type":"t","param":"model","code":"model_not_found"}}'
    assert isinstance(error_of(Reply(404, wrapped.headers, body)), UnknownModel)


@pytest.mark.parametrize(
    ("status", "content", "kind"),
    [
        (503, b"<html>busy</html>", CapacityError),
        (429, b"", QueueFull),
        (502, b"\xff\xfe", Bug),
        (418, b"[]", InvalidRequest),
        (400, b'{"code": 3}', InvalidRequest),
        (400, b"[" * 100_000, InvalidRequest),
    ],
)
def test_error_of_a_foreign_answer_goes_by_its_status(status, content, kind):
    """What a proxy answers is no Shoal error; its status decides, and its text is shown."""
    error = error_of(Reply(status, {"content-type": "text/html"}, content))
    assert type(error) is kind
    assert f"HTTP {status}" in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize("header", ["Wed, 21 Oct 2026 07:28:00 GMT", "-1", "nan", "1e9", ""])
def test_error_passes_over_an_odd_retry_after(header):
    """A date or nonsense in Retry-After does not break or hang a client."""
    assert error_of(refused(after=header)).retry_after_s is None


def test_exchange_sends_one_idempotency_key_with_all_tries():
    """`auto` makes a key for the call; a given one is sent as it is; without, none is sent."""
    keys = []
    for _ in range(2):
        drive = Drive(refused(), GOOD, idempotency_key="auto")
        drive.run()
        first, second = (send.headers["idempotency-key"] for send in drive.sends)
        assert first == second
        keys.append(first)
    assert keys[0] != keys[1]
    given = Drive(GOOD, idempotency_key="mine")
    given.run()
    assert given.sends[0].headers["idempotency-key"] == "mine"
    without = Drive(GOOD)
    without.run()
    assert "idempotency-key" not in without.sends[0].headers
