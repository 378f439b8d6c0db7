"""The account itself: it must see what it is there to see."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from shoal.runtimes.null import numbers
from tests.support.connection import Reply
from tests.support.ledger import Ask, Ledger, Row, judge
from tests.support.load import Load
from tests.support.pace import limit_s

ASK = Ask("mine", "echo", ["a", "b"], limit_s(0.2))


def reply(status, body, name="mine", **headers):
    return Reply(status, {"x-request-id": name} | headers, json.dumps(body).encode())


def answer(texts):
    return {"dense": numbers(texts, 8).tolist()}


def failure(code):
    return {"code": code, "message": "m", "param": None, "request_id": "mine"}


@pytest.mark.parametrize(
    ("verdict", "got"),
    [
        ("answered", reply(200, answer(["a", "b"]))),
        ("crossed", reply(200, answer(["a", "b"]), name="other")),
        ("crossed", reply(200, answer(["b", "a"]))),
        ("crossed", reply(200, answer(["a"]))),
        ("failed:deadline_exceeded", reply(504, failure("deadline_exceeded"))),
        ("unclear", reply(500, failure("deadline_exceeded"))),
        ("unclear", reply(500, failure("internal_error"))),
        ("unclear", reply(500, failure("run_failed"))),
        (
            "refused:queue_unavailable",
            reply(503, failure("queue_unavailable"), **{"retry-after": "1"}),
        ),
        ("refused:queue_full", reply(429, failure("queue_full"), **{"retry-after": "2"})),
    ],
)
def test_chaos_judge_tells_good_answers_from_bad(verdict, got):
    """Another's numbers, another's id, an untrue or undocumented error are seen as such."""
    assert judge(ASK, got, 0.01)[0] == verdict


def test_chaos_ledger_is_clean_only_without_faults():
    """Each kind of fault, an open row and bytes too many make it unclean."""
    assert Ledger([Row(ASK, 0, 0.0, "answered")]).clean
    assert not Ledger([], stray_bytes=1).clean
    for verdict in ("lost", "crossed", "duplicate", "unclear", "open"):
        ledger = Ledger([Row(ASK, 0, 0.0, verdict)])
        assert not ledger.clean
        assert "mine" in ledger.report()


@pytest.mark.parametrize(
    ("verdict", "copies", "close"),
    [("answered", 1, False), ("duplicate", 2, False), ("lost", 0, False), ("lost", 0, True)],
)
def test_chaos_callers_see_answers_that_are_missing_or_too_many(verdict, copies, close):
    """While the gateway lives, silence and a severed connection are losses; two are too many."""
    body = json.dumps(answer(["a", "b"])).encode()
    whole = b"HTTP/1.1 200 OK\r\nx-request-id: mine\r\ncontent-length: %d\r\n\r\n%b"

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(whole % (len(body), body) * copies)
        if not close:
            await reader.read()
        writer.close()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        fleet = SimpleNamespace(ports=[port], epochs=[0], late_s=[0.0], output="")
        load = Load(fleet, lambda _: ASK, callers=1, grace_s=0.0)
        async with load:
            while not load.ledger.rows:
                await asyncio.sleep(0)
            load.stopping = True
        assert [row.verdict for row in load.ledger.rows] == [verdict]
        server.close()
        await asyncio.sleep(0.02)  # transports close a turn after they are told to

    asyncio.run(main())
