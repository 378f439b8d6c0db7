"""What a request with an `Idempotency-Key` gets, on the queue in memory."""

from __future__ import annotations

import asyncio

import pytest

from shoal.clock import wall
from shoal.errors import (
    DeadlineExceeded,
    IdempotencyConflict,
    InvalidRequest,
    OutOfMemory,
    QueueUnavailable,
)
from shoal.gateway.idempotency import REPLAYED, Idempotency, once
from shoal.gateway.pages import Response
from shoal.queue.interface import QueueLimits
from shoal.queue.memory import MemoryBroker, MemoryKept, MemoryQueue
from tests.conftest import run, until

LARGE = 4096
MADE = (b"server-timing", b"x")


class Runs:
    """A route's work: counts itself, waits for `gate`, raises `fault`."""

    def __init__(self, body=b"answer", status=200, *, final=True) -> None:
        self.count = 0
        self.body, self.status, self.final = body, status, final
        self.fault: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self) -> Response:
        self.count += 1
        await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        return Response(self.status, b"text/plain", self.body, [MADE], self.final)


def gateways(**limits):
    broker = MemoryBroker(QueueLimits(**limits))
    return [
        Idempotency(MemoryQueue(broker), ttl_s=60, inline_max_bytes=LARGE - 1) for _ in range(2)
    ]


def asked(key=b"key", tenant=None, path="/v1/encode", body=b"body", time_s=30.0):
    return once(key, tenant, path, body, wall() + time_s)


@pytest.mark.parametrize(
    ("body", "status"), [(b"answer", 200), (b"x" * LARGE, 200), (b"wrong", 400)]
)
def test_idempotency_second_try_gets_the_kept_answer(body, status):
    """The answer of the first comes again, whole, through another gateway too, and is marked."""

    async def main():
        a, b = gateways()
        work = Runs(body, status)
        first = await a.answer(asked(), work)
        again = await b.answer(asked(), work)
        assert work.count == 1
        assert (again.status, again.content_type, again.body) == (status, b"text/plain", body)
        assert first.headers == [MADE]
        assert again.headers == [*first.headers, REPLAYED]

    run(main())


def test_idempotency_second_waits_for_the_first():
    """While the first runs a second waits and gets its answer."""

    async def main():
        a, b = gateways()
        work = Runs()
        work.gate.clear()
        tries = [asyncio.create_task(g.answer(asked(), work)) for g in (a, b, a)]
        await until(lambda: work.count)
        work.gate.set()
        answers = await asyncio.gather(*tries)
        assert work.count == 1
        assert sum(REPLAYED in answer.headers for answer in answers) == 2

    run(main())


def test_idempotency_second_waits_no_longer_than_its_deadline():
    """A second whose deadline passes first is told so; the first is not disturbed."""

    async def main():
        a, b = gateways()
        work = Runs()
        work.gate.clear()
        first = asyncio.create_task(a.answer(asked(), work))
        await until(lambda: work.count)
        with pytest.raises(DeadlineExceeded, match="still running"):
            await b.answer(asked(time_s=0.05), work)
        work.gate.set()
        assert (await first).body == b"answer"

    run(main())


@pytest.mark.parametrize("other", [{"body": b"another"}, {"path": "/v1/score"}])
def test_idempotency_key_of_another_request_is_a_conflict(other):
    """The same key with another body or route is refused, and names the header."""

    async def main():
        a, b = gateways()
        await a.answer(asked(), Runs())
        with pytest.raises(IdempotencyConflict) as caught:
            await b.answer(asked(**other), Runs())
        assert (caught.value.param, caught.value.http_status) == ("Idempotency-Key", 422)

    run(main())


def test_idempotency_tenants_do_not_meet():
    """The same key of another tenant is another key."""

    async def main():
        a, b = gateways()
        work = Runs()
        await a.answer(asked(tenant="one"), work)
        assert REPLAYED not in (await b.answer(asked(tenant="two"), work)).headers
        assert work.count == 2

    run(main())


def test_idempotency_failed_first_leaves_nothing():
    """After an error that may pass, the next try runs."""

    async def main():
        a, b = gateways()
        work = Runs()
        work.fault = OutOfMemory("for now")
        with pytest.raises(OutOfMemory):
            await a.answer(asked(), work)
        work.fault = None
        assert REPLAYED not in (await b.answer(asked(), work)).headers
        assert work.count == 2

    run(main())


def test_idempotency_answer_that_is_not_final_leaves_nothing():
    """An answer that another try may better is given once; who waited for it runs as well."""

    async def main():
        a, b = gateways()
        work = Runs(final=False)
        work.gate.clear()
        tries = [asyncio.create_task(g.answer(asked(), work)) for g in (a, b)]
        await until(lambda: work.count)
        work.gate.set()
        answers = await asyncio.gather(*tries)
        assert work.count == 2
        assert all((answer.body, answer.headers[-1]) == (b"answer", MADE) for answer in answers)

    run(main())


def test_idempotency_client_that_leaves_frees_its_key():
    """A try that is cancelled while it runs, or while it claims, does not hold up the next."""

    async def main():
        a, b = gateways()
        work = Runs()
        work.gate.clear()
        for turns in (1, 2, 3, 10):
            left = asyncio.create_task(a.answer(asked(), work))
            for _ in range(turns):
                await asyncio.sleep(0)
            left.cancel()
            with pytest.raises(asyncio.CancelledError):
                await left
        work.gate.set()
        assert REPLAYED not in (await b.answer(asked(time_s=1), work)).headers

    run(main())


class LateKept(MemoryKept):
    """Keeps an answer only once `gate` is open."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker, broker.kept, broker.limits.kept_max_bytes)
        self.gate, self.reached = asyncio.Event(), asyncio.Event()

    async def replace(self, key: str, data: bytes, ttl_s: float, revision: int) -> int | None:
        if revision:
            self.reached.set()
            await self.gate.wait()
        return await super().replace(key, data, ttl_s, revision)


def test_idempotency_client_that_leaves_late_finds_its_answer():
    """An answer that was ready when the client left is kept for its retry."""

    async def main():
        queue = MemoryQueue(broker := MemoryBroker(QueueLimits()))
        queue.kept = kept = LateKept(broker)
        a = Idempotency(queue, ttl_s=60, inline_max_bytes=LARGE)
        work = Runs()
        first = asyncio.create_task(a.answer(asked(), work))
        await kept.reached.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        kept.gate.set()
        assert REPLAYED in (await a.answer(asked(), work)).headers
        assert work.count == 1

    run(main())


def test_idempotency_store_that_is_full_refuses():
    """Where nothing can be kept a request with a key does not run."""

    async def main():
        a, _ = gateways(kept_max_bytes=10)
        work = Runs()
        with pytest.raises(QueueUnavailable):
            await a.answer(asked(), work)
        assert work.count == 0

    run(main())


@pytest.mark.parametrize("key", [b"", b"x" * 256, b"a b", "ä".encode(), b"a\tb"])
def test_idempotency_wrong_key_names_the_header(key):
    """A key is of 1 to 255 visible ASCII characters."""
    with pytest.raises(InvalidRequest) as caught:
        asked(key)
    assert caught.value.param == "Idempotency-Key"
    assert asked(b"x" * 255)
