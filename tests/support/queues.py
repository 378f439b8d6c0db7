"""Queues of both kinds, for the suites that check their contract."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shoal.queue.interface import Queue, QueueLimits
from shoal.queue.jetstream import JetStreamQueue
from shoal.queue.memory import MemoryBroker, MemoryQueue
from shoal.queue.topology import Topology
from tests.support.pace import limit_s

LIMITS = QueueLimits(
    max_queued_per_line=5,
    ack_wait_s=limit_s(0.8),  # whoever lives says so in time, on a slow machine too
    publish_timeout_s=limit_s(2.0),
    payload_max_bytes=2**25,
    answers_max_bytes=2**24,
    dead_max_letters=6,
    dead_max_bytes=2**20,
)
MODEL = "org/some.model"


class Line:
    """A worker's side of one line, as lists."""

    def __init__(self, queue: Queue, model: str = MODEL) -> None:
        self.queue, self.model = queue, model
        self.got: asyncio.Queue = asyncio.Queue(maxsize=100)
        self.ended = asyncio.Event()

    async def pull(self, max_items=1, expires_s=5.0, lane="interactive"):
        self.ended.clear()
        await self.queue.pull(
            self.model,
            lane,
            max_items=max_items,
            expires_s=expires_s,
            on_delivery=self.got.put_nowait,
            on_end=self.ended.set,
        )

    async def one(self, timeout_s=5.0):
        return await asyncio.wait_for(self.got.get(), limit_s(timeout_s))


class Pool:
    """Opens queues of one fresh pool."""

    def __init__(self, kind: str, server) -> None:
        self.kind, self.server = kind, server
        self.broker = MemoryBroker(LIMITS)
        self.topology = Topology(
            f"t{uuid.uuid4().hex[:8]}", "file", 1, LIMITS, ("interactive", "bulk")
        )
        self.opened: list[Queue] = []

    async def queue(self) -> Queue:
        if self.kind == "memory":
            queue: Queue = MemoryQueue(self.broker)
        else:
            queue = await JetStreamQueue.open(self.server.address, self.topology, name="test")
        self.opened.append(queue)
        return queue


@asynccontextmanager
async def opened(kind: str, server) -> AsyncIterator[Pool]:
    """A fresh pool, whose queues are closed in the end."""
    made = Pool(kind, server)
    try:
        yield made
    finally:
        for queue in made.opened:
            await queue.close()


_ids = itertools.count()


async def submit(
    queue, data=b"x", *, model=MODEL, item_id=None, lane="interactive", ttl_s=30.0, refused=None
):
    refusals = [] if refused is None else refused
    item = item_id or f"item-{next(_ids)}-{uuid.uuid4().hex}"
    await queue.submit(model, lane, data, item_id=item, ttl_s=ttl_s, on_refused=refusals.append)
    return refusals
