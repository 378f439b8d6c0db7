"""Texts through a queue: what is published, how pieces come, and what ends a stream."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import msgspec
import pytest

from shoal.catalog.schema import Entry
from shoal.clock import wall
from shoal.errors import DeadlineExceeded, InvalidRequest, RuntimeCrashed
from shoal.gateway.costs import EXPECTED_TOKENS
from shoal.gateway.jobs import End, Grew, Job
from shoal.wire.envelope import (
    Failure,
    Inputs,
    Outcome,
    Params,
    Result,
    Timing,
    decode_inputs,
    encode,
)
from shoal.wire.generation import ChatMessage, Generated, Generation, Piece, pack
from tests.conftest import run, until
from tests.support.pace import limit_s
from tests.support.submit_place import Place as AnyPlace

ENTRY = Entry(id="m", tasks=["generate"], source="file:///x")


class Place(AnyPlace):
    """The same place, for texts that grow."""

    def __init__(self):
        super().__init__(entry=ENTRY, paced=True)

    def job(self, *texts, time_s=30.0, chat=None, **asked):
        asked = Generation(**{"stream": True, **asked})
        inputs = Inputs(texts=list(texts), chats=[chat] if chat else [])
        params = Params(generation=asked)
        return Job("r", "generate", ENTRY, inputs, params, "interactive", wall() + time_s)

    async def grow(self, item, at, text, worker="w"):
        outcome = Outcome(item.item, piece=Piece(text, 1), at=at, worker=worker)
        await self.hand.reply(item.reply, encode(outcome))

    async def end(self, item, text, worker="w"):
        result = Result(records=[pack(Generated(text, "stop", 3, 4))])
        timing = Timing(run_s=1.0)
        raw = msgspec.Raw(encode(result))
        outcome = Outcome(item.item, result=raw, tokens=3, timing=timing, worker=worker)
        await self.hand.reply(item.reply, encode(outcome))

    async def fail(self, item, error):
        await self.hand.reply(item.reply, encode(Outcome(item.item, failure=Failure.of(error))))


class Reader:
    """Reads a stream in a task of its own, as a request does."""

    def __init__(self, place, job):
        self.got = []
        self.task = asyncio.create_task(self._read(place.submitter.stream(job)))

    async def _read(self, stream):
        async with aclosing(stream) as events:
            async for index, event in events:
                ended = isinstance(event, End)
                self.got.append((index, event.generated.text if ended else event.piece.text))

    def text(self, index=0):
        """What came of a text, its end left out."""
        return "".join(text for at, text in self.got if at == index)


def test_submit_stream_is_read_while_the_rest_waits_for_room():
    """Of many texts as many lie in the line as can soon begin; what is whole is read meanwhile."""

    async def main():
        async with Place() as place:
            reader = Reader(place, place.job(*(f"p{n}" for n in range(20))))
            for item in await place.take(8):
                await place.end(item, f"text {item.index}")
            await until(lambda: len(reader.got) >= 8)
            for item in await place.take(8):
                await place.end(item, f"text {item.index}")
            await until(lambda: len(reader.got) >= 16)
            assert not reader.task.done()
            for item in await place.take(4):
                await place.end(item, f"text {item.index}")
            await reader.task
            assert sorted(set(reader.got)) == [(i, f"text {i}") for i in range(20)]

    run(main())


def test_submit_stream_gives_every_choice_an_item():
    """Prompts and their choices are items of one input, at the cost of what may be expected."""

    async def main():
        async with Place() as place:
            reader = Reader(place, place.job("ab", "ab", "cde", "cde", n=2, max_tokens=10))
            items = await place.take(4)
            assert [decode_inputs(bytes(item.body)).texts for item in items] == [
                *(["ab"], ["ab"], ["cde"], ["cde"])
            ]
            assert [(item.index, item.of, item.n_inputs) for item in items] == [
                (i, 4, 1) for i in range(4)
            ]
            assert [item.cost_tokens for item in items] == [12, 12, 13, 13]
            assert place.book.message().tokens == {"interactive": {"m@1": 50}}
            for item in items:
                await place.end(item, f"text {item.index}")
            await reader.task
            assert [text for _, text in reader.got[1::2]] == [f"text {i}" for i in range(4)]
            assert place.book.message().tokens == {}
            assert place.cancelled == []

    run(main())


def test_submit_stream_of_a_conversation_travels_whole():
    """The turns are in the item; without `max_tokens` the usual length is its cost."""

    async def main():
        async with Place() as place:
            chat = [ChatMessage("user", "hello")]
            reader = Reader(place, place.job(chat=chat))
            (item,) = await place.take(1)
            assert decode_inputs(bytes(item.body)).chats == [chat]
            assert item.cost_tokens > EXPECTED_TOKENS + len("hello")
            await place.end(item, "hi")
            await reader.task

    run(main())


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_submit_learns_what_texts_usually_cost(stream):
    """After texts that are short, a further one of that model is expected to be short, too."""

    async def main():
        async with Place() as place:
            costs_tokens = []
            for _ in range(3):
                job = place.job("a", stream=stream)
                asking = Reader(place, job).task if stream else place.submitter.run(job)
                task = asyncio.ensure_future(asking)
                (item,) = await place.take(1)
                costs_tokens.append(item.cost_tokens)
                await place.end(item, "short")
                await task
            assert costs_tokens == sorted(costs_tokens, reverse=True)
            assert costs_tokens[-1] < costs_tokens[0] / 2

    run(main())


def test_submit_stream_pieces_come_as_they_are_sent():
    """Each piece is there before the next is sent, and the item waits until its end."""

    async def main():
        async with Place() as place:
            reader = Reader(place, place.job("a"))
            (item,) = await place.take(1)
            for at, word in enumerate("xyz"):
                await place.grow(item, at, word)
                await until(lambda n=at + 1: len(reader.got) == n)
                assert place.submitter.in_flight == 1
            await place.end(item, "xyz")
            await reader.task
            assert reader.got == [(0, "x"), (0, "y"), (0, "z"), (0, "xyz")]
            assert place.submitter.in_flight == 0

    run(main())


def test_submit_stream_mends_a_lost_piece():
    """A piece that never came is in what the end brings; nothing is told twice."""

    async def main():
        async with Place() as place:
            reader = Reader(place, place.job("a"))
            (item,) = await place.take(1)
            await place.grow(item, 0, "x")
            await place.grow(item, 2, "z")
            await place.end(item, "xyz")
            await reader.task
            assert reader.got[-2:] in ([(0, "yz"), (0, "xyz")], [(0, "xyz"), (0, "xyz")])

    run(main())


def test_submit_stream_goes_on_at_another_worker_before_anything_was_told():
    """An item that begins anew in silence is streamed from there; later it is an error."""

    async def main():
        async with Place() as place:
            reader = Reader(place, place.job("a"))
            (item,) = await place.take(1)
            await place.grow(item, 0, "")
            await place.grow(item, 0, "x", worker="other")
            await until(lambda: reader.text() == "x")
            await place.grow(item, 0, "u", worker="third")
            with pytest.raises(RuntimeCrashed, match="anew"):
                await reader.task
            await until(lambda: [c.request for c in place.cancelled] == [item.request])

    run(main())


@pytest.mark.parametrize("why", ["client", "deadline", "failure"])
def test_submit_stream_that_ends_early_is_withdrawn(why):
    """A caller that leaves, a deadline and a failed choice end all texts of the request."""

    async def main():
        async with Place() as place:
            time_s = limit_s(0.3) if why == "deadline" else 60.0
            reader = Reader(place, place.job("a", "a", n=2, time_s=time_s))
            items = await place.take(2)
            await place.grow(items[0], 0, "x")
            await until(lambda: reader.got == [(0, "x")])
            if why == "client":
                reader.task.cancel()
            if why == "failure":
                await place.fail(items[1], InvalidRequest("no such thing", param="schema"))
            await asyncio.wait([reader.task], timeout=limit_s(5))
            if why == "client":
                assert reader.task.cancelled()
            else:
                kinds = {"deadline": DeadlineExceeded, "failure": InvalidRequest}
                assert type(reader.task.exception()) is kinds[why]
            assert place.book.message().tokens == {}
            assert place.submitter.in_flight == 0
            await until(lambda: [c.request for c in place.cancelled] == [items[0].request])

    run(main())


def test_submit_stream_without_a_reader_holds_one_piece():
    """While nobody reads, pieces become one; the item ends all the same."""

    async def main():
        async with Place() as place:
            stream = place.submitter.stream(place.job("a"))
            first = asyncio.create_task(anext(stream))
            (item,) = await place.take(1)
            await place.grow(item, 0, "0 ")
            assert (await first)[1].piece.text == "0 "
            words = [f"{at} " for at in range(1, 500)]
            for at, word in enumerate(words, start=1):
                await place.grow(item, at, word)
            await place.end(item, "".join(["0 ", *words]))
            await until(lambda: place.submitter.in_flight == 0)
            rest = [event async for _, event in stream]
            assert [type(event) for event in rest] == [Grew, End]
            assert rest[0].piece.text == "".join(words)

    run(main())


def test_submit_whole_texts_need_no_stream():
    """Without `stream` the answer is one result with a record for each text; pieces are ignored."""

    async def main():
        async with Place() as place:
            task = asyncio.create_task(place.submitter.run(place.job("a", "b", stream=False)))
            items = await place.take(2)
            await place.grow(items[0], 0, "x")
            await place.end(items[1], "second")
            await place.end(items[0], "first")
            answer = await task
            assert len(answer.result.records) == 2
            assert place.cancelled == []

    run(main())


def test_submit_stream_that_fails_ends_however_slow_its_reader_is():
    """The other texts are withdrawn at once, and there is one last event before the error.

    Each time the reader comes back there is news; that does not put the error off.
    """

    async def main():
        async with Place() as place:
            stream = place.submitter.stream(place.job("a", "a", n=2))
            first = asyncio.create_task(anext(stream))
            items = await place.take(2)
            await place.grow(items[0], 0, "0")
            await first
            await place.grow(items[0], 1, "1")
            await place.fail(items[1], InvalidRequest("no such thing"))
            await until(lambda: [c.request for c in place.cancelled] == [items[0].request])
            assert (place.submitter.in_flight, place.book.message().tokens) == (0, {})
            assert (await anext(stream))[1].piece.text == "1"
            await place.grow(items[0], 2, "2")
            with pytest.raises(InvalidRequest):
                await anext(stream)

    run(main())
