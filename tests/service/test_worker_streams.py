"""Slots and streams: a worker and a runtime process that really generate, asked over a real queue.

What is sent is what a gateway sends; what comes back is read as a gateway reads it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path

import pytest

from shoal.cli.reach import Reach, opened
from shoal.runtimes.null_texts import word
from shoal.wire import envelope as wire
from shoal.wire.generation import Generation, unpack
from tests.conftest import run
from tests.support.pace import limit_s
from tests.support.shoal_process import Serve

GENERATORS = {
    "quick": "{tokens: 5}",
    "steady": "{tokens: 1000, token_s: 0.02, slots: 3}",
    "fragile": "{tokens: 20, token_s: 0.02, crash: dynamite}",
    "hanging": "{tokens: 5, token_s: 1000}",
    "broken": "{load_fails: config}",
    "crowded": "{tokens: 20, token_s: 0.03, slots: 4, crash: dynamite}",
}


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams")
    server = Serve(folder, "--devices", "cpu:1", generators=GENERATORS, SHOAL_RUN_TIMEOUT_S="2")
    yield server
    assert server.leave() == 0, server.output


class Asker:
    """A gateway's place at the queue: it submits, and keeps every outcome by its item."""

    numbers = itertools.count()

    def __init__(self, queue) -> None:
        self.queue = queue
        self.outcomes: dict[str, list[wire.Outcome]] = {}
        self.news = asyncio.Event()

    def on_outcome(self, data: bytes) -> None:
        outcome = wire.decode_outcome(data)
        self.outcomes.setdefault(outcome.item, []).append(outcome)
        self.news.set()

    async def submit(self, model, prompt, *, lane="interactive", deadline_s=20.0, index=0, **asked):
        request = f"asker-{next(self.numbers)}"
        generation = Generation(**{"stream": True, **asked})
        envelope = wire.Envelope(
            item=f"{request}.{index}",
            request=request,
            index=index,
            of=generation.n,
            task="generate",
            model=model,
            revision="1",
            lane=lane,
            cost_tokens=10,
            n_inputs=1,
            deadline_s=time.time() + deadline_s,
            submitted_s=time.time(),
            reply=self.queue.inbox,
            params=wire.Params(generation=generation),
            body=wire.msgspec.Raw(wire.encode(wire.Inputs(texts=[prompt]))),
        )
        await self.queue.submit(
            f"{model}@1",
            lane,
            wire.encode(envelope),
            item_id=envelope.item,
            ttl_s=deadline_s,
            on_refused=lambda error: pytest.fail(str(error)),
        )
        return envelope.item

    async def until(self, condition, timeout_s=20.0):
        async with asyncio.timeout(limit_s(timeout_s)):
            while not condition():
                self.news.clear()
                await self.news.wait()

    def pieces(self, item):
        return [o.piece for o in self.outcomes.get(item, []) if o.piece is not None]

    def ends(self, item):
        return [o for o in self.outcomes.get(item, []) if o.piece is None]

    async def end(self, item, timeout_s=20.0):
        await self.until(lambda: self.ends(item), timeout_s)
        return self.ends(item)[0]

    async def whole(self, item):
        outcome = await self.end(item)
        assert outcome.failure is None, outcome.failure
        return unpack(wire.decode_result(bytes(outcome.result)).records[0])


def asking(serve):
    """Runs a test with an asker of its own."""

    def runs(test):
        async def main():
            async with opened(Reach(None, None, serve.folder / "data")) as queue:
                asker = Asker(queue)
                await queue.listen(asker.on_outcome)
                await test(asker)

        run(main(), timeout_s=60)

    return runs


def test_streams_send_pieces_in_order_then_the_whole(serve):
    """The pieces of a text, joined, are the text; they are numbered, and the whole comes last."""

    @asking(serve)
    async def _(asker):
        item = await asker.submit("quick", "a prompt of five words")
        whole = await asker.whole(item)
        outcomes = asker.outcomes[item]
        pieces = [o for o in outcomes if o.piece is not None]
        assert [o.at for o in pieces] == list(range(len(pieces)))
        assert "".join(o.piece.text for o in pieces) == whole.text
        assert outcomes[-1].piece is None
        expected = "".join(word("a prompt of five words", at, None) for at in range(5))
        assert (whole.text, whole.tokens, whole.prompt_tokens) == (expected, 5, 5)


def test_streams_send_the_whole_alone_where_no_pieces_are_wanted(serve):
    """Who does not stream gets one outcome."""

    @asking(serve)
    async def _(asker):
        item = await asker.submit("quick", "a prompt", stream=False)
        whole = await asker.whole(item)
        assert whole.tokens == 5
        assert len(asker.outcomes[item]) == 1


def test_streams_seed_each_choice_of_an_input(serve):
    """The choices of one prompt differ by their seeds, and a seed gives the same text again."""

    @asking(serve)
    async def _(asker):
        items = [await asker.submit("quick", "dice", seed=7, n=3, index=i) for i in range(3)]
        texts = [(await asker.whole(item)).text for item in items]
        again = await asker.submit("quick", "dice", seed=8)
        assert len(set(texts)) == 3
        assert (await asker.whole(again)).text == texts[1]


def test_streams_never_grow_more_texts_than_there_are_slots(serve):
    """Of more texts than slots, the others wait at the broker; each cancel lets one more begin."""

    @asking(serve)
    async def _(asker):
        items = [await asker.submit("steady", f"text {n}") for n in range(6)]

        def growing():
            return {item for item in items if asker.pieces(item)}

        await asker.until(lambda: len(growing()) == 3)
        await asyncio.sleep(0.3)
        assert len(growing()) == 3
        first = next(iter(growing()))
        await asker.queue.tell("cancel", wire.encode(wire.Cancel(first.partition(".")[0])))
        cancelled_s = time.monotonic()
        await asker.until(lambda: len(growing()) == 4)
        assert time.monotonic() - cancelled_s < limit_s(2.0)
        assert not asker.ends(first)
        for item in items:
            await asker.queue.tell("cancel", wire.encode(wire.Cancel(item.partition(".")[0])))


def test_streams_let_the_lane_in_a_hurry_in(serve):
    """With bulk texts in all the slots that bulk may have, an interactive text begins at once."""

    @asking(serve)
    async def _(asker):
        bulk = [await asker.submit("steady", f"bulk {n}", lane="bulk") for n in range(4)]
        await asker.until(lambda: sum(bool(asker.pieces(item)) for item in bulk) == 2)
        item = await asker.submit("steady", "hurry", max_tokens=3)
        await asker.whole(item)
        assert sum(bool(asker.pieces(item)) for item in bulk) == 2
        for each in bulk:
            await asker.queue.tell("cancel", wire.encode(wire.Cancel(each.partition(".")[0])))


def test_streams_end_at_the_deadline(serve):
    """A text that is not whole by its deadline ends there, and its slot is free."""

    @asking(serve)
    async def _(asker):
        await asker.whole(await asker.submit("steady", "loads it", max_tokens=1))
        item = await asker.submit("steady", "endless", deadline_s=limit_s(0.5))
        outcome = await asker.end(item)
        assert outcome.failure.code == "deadline_exceeded"
        assert asker.pieces(item)


def test_streams_tell_of_an_engine_that_dies_in_mid_text(serve):
    """A text that was being read ends with an error at once; the next request is served."""

    @asking(serve)
    async def _(asker):
        bad = await asker.submit("fragile", "dynamite")
        outcome = await asker.end(bad)
        assert outcome.failure.code == "runtime_crashed"
        assert asker.pieces(bad)
        await asyncio.sleep(0.5)
        assert len(asker.ends(bad)) == 1  # no other attempt
        good = await asker.submit("fragile", "harmless")
        assert (await asker.whole(good)).tokens == 20


def test_streams_try_a_text_again_that_nobody_has_read(serve):
    """Without pieces sent, a lost text begins anew, by itself, until its attempts are over."""

    @asking(serve)
    async def _(asker):
        bad = await asker.submit("fragile", "dynamite", stream=False)
        others = [await asker.submit("fragile", f"other {n}", stream=False) for n in range(2)]
        for item in others:
            assert (await asker.whole(item)).tokens == 20
        assert (await asker.end(bad)).failure.code == "runtime_crashed"


def test_streams_tell_at_once_of_a_generator_that_does_not_load(serve):
    """Who asks for a model that cannot be loaded hears why, long before the deadline."""

    @asking(serve)
    async def _(asker):
        item = await asker.submit("broken", "hello", deadline_s=30.0)
        outcome = await asker.end(item, timeout_s=15.0)
        assert outcome.failure.code == "model_unavailable"
        assert "told to find weights that do not fit" in outcome.failure.message


def test_streams_let_fresh_texts_in_between_the_suspects_of_a_crash(serve):
    """After a crash its texts run by themselves, and a fresh one waits for one of them, not all."""

    @asking(serve)
    async def _(asker):
        innocent = [
            await asker.submit("crowded", f"innocent {n}", stream=False, deadline_s=40.0)
            for n in range(3)
        ]
        await asyncio.sleep(0.2)
        before = serve.output.count(" died with status")
        culprit = await asker.submit("crowded", "dynamite", stream=False, deadline_s=40.0)
        async with asyncio.timeout(limit_s(20)):
            while serve.output.count(" died with status") == before:
                await asyncio.sleep(0.05)
        fresh = await asker.submit("crowded", "fresh", stream=False, deadline_s=40.0)
        assert (await asker.whole(fresh)).tokens == 20
        assert not all(asker.ends(item) for item in [*innocent, culprit])
        for item in innocent:
            assert (await asker.whole(item)).tokens == 20


def test_streams_survive_an_eviction_that_found_a_text_growing(serve):
    """An operator's evict that came while a text grew does nothing, and harms nothing later."""

    @asking(serve)
    async def _(asker):
        item = await asker.submit("steady", "long", max_tokens=30)
        await asker.until(lambda: asker.pieces(item))
        await asker.queue.tell("nudge", wire.encode(wire.Nudge("evict", "steady@1")))
        assert (await asker.whole(item)).tokens == 30
        again = await asker.submit("steady", "again", max_tokens=3)
        assert (await asker.whole(again)).tokens == 3


def test_streams_leave_with_a_word_to_those_who_read(tmp_path):
    """A worker that leaves ends the texts that somebody reads, at once and with the reason."""
    server = Serve(
        tmp_path,
        *("--devices", "cpu:1", "--drain-s", "0.5"),
        generators={"steady": "{tokens: 1000, token_s: 0.02}"},
    )
    told = []

    @asking(server)
    async def _(asker):
        item = await asker.submit("steady", "long")
        await asker.until(lambda: asker.pieces(item))
        (worker,) = server.children("shoal worker")[:1] or server.children("-m shoal worker")
        worker.terminate()
        told.append((await asker.end(item, timeout_s=10.0)).failure)

    assert told[0].code == "shutting_down"
    server.leave()


def test_streams_renew_an_engine_that_hangs(serve):
    """An engine of which nothing comes for longer than it may take is started anew."""

    @asking(serve)
    async def _(asker):
        item = await asker.submit("hanging", "wait", deadline_s=15.0)
        outcome = await asker.end(item)
        assert outcome.failure.code == "runtime_crashed"
        assert "hangs and is started anew" in serve.output


def test_streams_stand_back_behind_other_work(serve):
    """A generator's process has a lower priority than the worker's other processes."""

    @asking(serve)
    async def _(asker):
        await asker.whole(await asker.submit("quick", "hello"))
        generators = serve.children("--nice 10")
        assert {p.nice() for p in generators} == {10}
        # Linux weighs sessions against one another first, where it has groups of them.
        groups = [Path(f"/proc/{p.pid}/autogroup") for p in generators]
        assert {g.read_text().split()[-1] for g in groups if g.exists()} <= {"10"}
