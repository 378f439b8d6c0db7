"""One suite for every implementation of the queue's contract."""

from __future__ import annotations

import asyncio
import time
import uuid
from functools import partial

import pytest

from shoal.errors import QueueFull, QueueUnavailable
from shoal.wire.envelope import DeadLetter, Failure
from tests.conftest import run, until
from tests.support.pace import limit_s
from tests.support.queues import LIMITS, MODEL, Line, opened, submit

BRIEF_S = limit_s(0.4)  # of a pull whose end a test waits for
NAK_S = 0.3


@pytest.fixture(params=["memory", "jetstream"])
def pool(request):
    server = request.getfixturevalue("nats_server") if request.param == "jetstream" else None
    return partial(opened, request.param, server)


def test_queue_delivers_what_was_submitted_in_order(pool):
    """Items of a line arrive in order, each once, and the pull ends when it is full."""

    async def main():
        async with pool() as p:
            gateway, worker = await p.queue(), await p.queue()
            line = Line(worker)
            for n in range(3):
                await submit(gateway, b"%d" % n)
            await line.pull(max_items=3)
            got = [await line.one() for _ in range(3)]
            assert [d.data for d in got] == [b"0", b"1", b"2"]
            assert [d.attempt for d in got] == [1, 1, 1]
            await asyncio.wait_for(line.ended.wait(), limit_s(5))
            for d in got:
                await d.ack()

    run(main())


def test_queue_pull_waits_for_work_and_expires(pool):
    """A pull on an empty line takes later work, and ends by itself when nothing comes."""

    async def main():
        async with pool() as p:
            queue = await p.queue()
            line = Line(queue)
            await line.pull(max_items=2, expires_s=BRIEF_S)
            await submit(queue, b"late")
            assert (await line.one()).data == b"late"
            await asyncio.wait_for(line.ended.wait(), limit_s(5))
            assert line.got.empty()

    run(main())


def test_queue_lanes_and_models_are_separate_lines(pool):
    """A pull of one lane never takes the other lane's items."""

    async def main():
        async with pool() as p:
            queue = await p.queue()
            line = Line(queue)
            await submit(queue, b"bulk", lane="bulk")
            await line.pull(expires_s=BRIEF_S)
            await asyncio.wait_for(line.ended.wait(), limit_s(5))
            assert line.got.empty()
            await line.pull(lane="bulk")
            assert (await line.one()).data == b"bulk"

    run(main())


def test_queue_full_line_refuses_with_queue_full(pool):
    """The item over a line's bound is refused as 429; the earlier ones stay."""

    async def main():
        async with pool() as p:
            queue = await p.queue()
            refused: list = []
            for _ in range(LIMITS.max_queued_per_line + 1):
                await submit(queue, refused=refused)
            await until(lambda: refused)
            assert [type(e) for e in refused] == [QueueFull]
            line = Line(queue)
            await line.pull(max_items=10, expires_s=BRIEF_S)
            await asyncio.wait_for(line.ended.wait(), limit_s(5))
            assert line.got.qsize() == LIMITS.max_queued_per_line

    run(main())


def test_queue_same_item_id_is_one_item(pool):
    """A publish that is repeated under the same item id does not run twice."""

    async def main():
        async with pool() as p:
            queue = await p.queue()
            item_id = uuid.uuid4().hex
            await submit(queue, item_id=item_id)
            await submit(queue, item_id=item_id)
            line = Line(queue)
            await line.pull(max_items=5, expires_s=BRIEF_S)
            await asyncio.wait_for(line.ended.wait(), limit_s(5))
            assert line.got.qsize() == 1

    run(main())


def test_queue_unacked_item_comes_back_with_a_higher_attempt(pool):
    """What a vanished worker held is delivered again after ack_wait."""

    async def main():
        async with pool() as p:
            queue = await p.queue()
            line = Line(queue)
            await submit(queue, b"again")
            await line.pull()
            assert (await line.one()).attempt == 1
            await line.pull()
            second = await line.one()
            assert (second.data, second.attempt) == (b"again", 2)
            await second.ack()

    run(main())


def test_queue_in_progress_keeps_an_item(pool):
    """An item that is reported to be in progress is not delivered to anyone else."""

    async def main():
        async with pool() as p:
            queue = await p.queue()
            line = Line(queue)
            await submit(queue)
            await line.pull()
            held = await line.one()
            await line.pull(expires_s=2 * LIMITS.ack_wait_s)
            for _ in range(8):
                await asyncio.sleep(LIMITS.ack_wait_s / 4)
                await held.in_progress()
            await held.ack()
            await asyncio.wait_for(line.ended.wait(), limit_s(5))
            assert line.got.empty()

    run(main())


def test_queue_nak_returns_an_item_after_its_delay(pool):
    """A naked item comes back, not before its delay."""

    async def main():
        async with pool() as p:
            queue = await p.queue()
            line = Line(queue)
            await submit(queue)
            await line.pull()
            held = await line.one()
            begun_s = time.monotonic()
            await held.nak(NAK_S)
            await line.pull()
            assert (await line.one()).attempt == 2
            assert time.monotonic() - begun_s > NAK_S - 0.05

    run(main())


def test_queue_item_given_back_untouched_has_had_no_attempt(pool):
    """A delivery that is naked untouched does not count, for a process that opens later, too."""

    async def main():
        async with pool() as p:
            a, b = Line(await p.queue()), Line(await p.queue())
            await submit(a.queue)
            attempts = []
            for line, untouched in ((a, True), (b, True), (a, False), (b, True)):
                await line.pull()
                delivery = await line.one()
                attempts.append(delivery.attempt)
                await delivery.nak(untouched=untouched)
            late = Line(await p.queue())
            await late.pull()
            attempts.append((await late.one()).attempt)
            assert attempts == [1, 1, 1, 2, 2]

    run(main())


def test_queue_acked_item_is_gone(pool):
    """An acked item leaves the line and makes room in it."""

    async def main():
        async with pool() as p:
            queue = await p.queue()
            line = Line(queue)
            for _ in range(LIMITS.max_queued_per_line * 2):
                assert await submit(queue) == []
                await line.pull()
                await (await line.one()).ack()
            await line.pull(expires_s=1.5 * LIMITS.ack_wait_s)
            await asyncio.wait_for(line.ended.wait(), limit_s(5))
            assert line.got.empty()

    run(main())


def test_queue_item_expires_with_its_ttl(pool):
    """An item that nobody took before its deadline is dropped by the queue itself."""

    async def main():
        async with pool() as p:
            queue = await p.queue()
            await submit(queue, ttl_s=0.5)
            await asyncio.sleep(limit_s(2.6))  # brokers keep whole seconds
            line = Line(queue)
            await line.pull(expires_s=BRIEF_S)
            await asyncio.wait_for(line.ended.wait(), limit_s(5))
            assert line.got.empty()

    run(main())


def test_queue_two_workers_share_a_line(pool):
    """Two workers that pull the same line get different items."""

    async def main():
        async with pool() as p:
            gateway, a, b = await p.queue(), Line(await p.queue()), Line(await p.queue())
            await a.pull(max_items=2)
            await b.pull(max_items=2)
            for n in range(4):
                await submit(gateway, b"%d" % n)
            got = [await line.one() for line in (a, a, b, b)]
            assert sorted(d.data for d in got) == [b"0", b"1", b"2", b"3"]
            for d in got:
                await d.ack()

    run(main())


def test_queue_stop_pulling_leaves_items_to_others(pool):
    """After stop_pulling nothing arrives here, and another worker gets the item at once."""

    async def main():
        async with pool() as p:
            leaving, staying = await p.queue(), await p.queue()
            a, b = Line(leaving), Line(staying)
            await a.pull(max_items=5)
            await leaving.stop_pulling()
            await b.pull()
            await submit(staying, b"mine")
            assert (await b.one()).data == b"mine"
            assert a.got.empty()

    run(main())


def test_queue_replies_and_control_reach_their_listeners(pool):
    """Outcomes go to the inbox that they name, control messages to everyone who hears them."""

    async def main():
        async with pool() as p:
            a, b = await p.queue(), await p.queue()
            outcomes, heard_a, heard_b = [], [], []
            await a.listen(outcomes.append)
            await a.hear("cancel", heard_a.append)
            await b.hear("cancel", heard_b.append)
            await b.reply(a.inbox, b"outcome")
            await b.tell("cancel", b"request")
            await until(lambda: outcomes and heard_a and heard_b)
            assert (outcomes, heard_a, heard_b) == ([b"outcome"], [b"request"], [b"request"])

    run(main())


def test_queue_payloads_keep_large_bodies_and_check_them(pool):
    """A payload larger than a message comes back intact to another process, then is gone."""

    async def main():
        async with pool() as p:
            a, b = await p.queue(), await p.queue()
            data = bytes(range(256)) * 40_000
            ref = await a.payloads.put(data)
            assert (ref.size_bytes, await b.payloads.get(ref)) == (len(data), data)
            forged = type(ref)(ref.key, ref.size_bytes, "0" * 64)
            with pytest.raises(QueueUnavailable, match="digest"):
                await b.payloads.get(forged)
            await a.payloads.delete(ref)
            with pytest.raises(QueueUnavailable, match="gone"):
                await b.payloads.get(ref)

    run(main())


def test_queue_dead_letters_are_kept_read_and_dropped(pool):
    """A buried item comes back whole, in order, to any process, until it is dropped."""

    async def main():
        async with pool() as p:
            a, b = await p.queue(), await p.queue()
            for n in range(3):
                cause = Failure("run_failed", f"cause {n}")
                await a.dead.bury(DeadLetter(b"envelope", cause, 4, "w", 1.0, MODEL, f"i{n}"))
            found = await b.dead.read()
            assert [f.letter.cause.message for f in found] == ["cause 0", "cause 1", "cause 2"]
            assert found[0].letter.envelope == b"envelope"
            assert [f.letter.item for f in await b.dead.read(found[1].number, 1)] == ["i1"]
            assert await b.dead.drop(found[1].number)
            assert not await b.dead.drop(found[1].number)
            assert [f.letter.item for f in await a.dead.read()] == ["i0", "i2"]

    run(main())


def test_queue_dead_letters_are_bounded(pool):
    """Past their bound the oldest letters make room."""

    async def main():
        async with pool() as p:
            queue = await p.queue()
            for n in range(LIMITS.dead_max_letters + 3):
                letter = DeadLetter(b"x", Failure("bug", ""), 1, "w", 1.0, MODEL, f"i{n}")
                await queue.dead.bury(letter)
            items = [f.letter.item for f in await queue.dead.read()]
            assert items == [f"i{n}" for n in range(3, LIMITS.dead_max_letters + 3)]

    run(main())


def test_queue_closed_refuses_at_once(pool):
    """A queue that was closed fails a submit and a pull immediately instead of hanging."""

    async def main():
        async with pool() as p:
            queue = await p.queue()
            await queue.close()
            assert not queue.connected
            with pytest.raises(QueueUnavailable):
                await submit(queue)
            with pytest.raises(QueueUnavailable):
                await Line(queue).pull()

    run(main())
