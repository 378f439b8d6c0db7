"""Outcomes that are kept for those who missed them, and the question for them."""

from __future__ import annotations

import asyncio

import pytest

from shoal.gateway.recall import Recall
from shoal.queue.interface import QueueLimits
from shoal.queue.memory import MemoryBroker, MemoryQueue
from shoal.wire.envelope import Missing, Outcome, decode_missing, decode_outcome, encode
from shoal.worker.sent import SentOutcomes


def outcome(item, worker="w"):
    return encode(Outcome(item, worker=worker))


def test_sent_outcomes_send_again_only_what_is_missing_and_known():
    """A gateway that names its open items gets the outcomes of those that are done."""

    async def main():
        broker = MemoryBroker(QueueLimits())
        worker, gateway = MemoryQueue(broker), MemoryQueue(broker)
        got = []
        await gateway.listen(got.append)
        sent = SentOutcomes(worker)
        for item in ("a", "b", "c"):
            sent.add(item, outcome(item))
        sent.on_missing(encode(Missing(gateway.inbox, ["c", "unknown", "a"])))
        sent.on_missing(b"nonsense")
        for _ in range(5):
            await asyncio.sleep(0)
        assert [decode_outcome(data).item for data in got] == ["c", "a"]

    asyncio.run(main())


@pytest.mark.parametrize("bounds", [{"max_outcomes": 10}, {"max_bytes": 10 * len(outcome("00"))}])
def test_sent_outcomes_forget_the_oldest_beyond_a_bound(bounds):
    """Number and bytes are bounded; an item that is answered twice counts once."""
    sent = SentOutcomes(MemoryQueue(MemoryBroker(QueueLimits())), **bounds)
    for n in range(30):
        sent.add(f"{n:02}", outcome(f"{n:02}"))
        sent.add(f"{n:02}", outcome(f"{n:02}"))
    assert list(sent._outcomes) == [f"{n:02}" for n in range(20, 30)]
    assert sent._size_bytes == 10 * len(outcome("00"))


def test_recall_asks_once_for_many_reasons_and_in_bounded_messages():
    """A hundred workers that come back at the same moment cause one question, cut into pieces."""

    async def main():
        queue = MemoryQueue(MemoryBroker(QueueLimits()))
        heard = []
        await queue.hear("missing", heard.append)
        items = [f"item {n}" for n in range(10)]
        recall = Recall(queue, lambda: items, gather_s=0, max_items=4)
        for _ in range(100):
            recall.on_back(b"")
        for _ in range(5):
            await asyncio.sleep(0)
        asked = [decode_missing(data) for data in heard]
        assert [len(each.items) for each in asked] == [4, 4, 2]
        assert {each.inbox for each in asked} == {queue.inbox}
        await recall.ask_soon()
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(heard) == 6

    asyncio.run(main())
