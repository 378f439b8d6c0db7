"""The submit path of a gateway on a queue inside the process, and a worker's hand beside it."""

from __future__ import annotations

import asyncio
import math

import msgspec
import numpy as np

from shoal.catalog.schema import Entry, Output, Profile
from shoal.catalog.snapshot import Snapshot
from shoal.clock import wall
from shoal.core.lanes import DEFAULT_LANES, parse_lanes
from shoal.gateway.backlog import BacklogBook
from shoal.gateway.fleet import Fleet
from shoal.gateway.jobs import Job
from shoal.gateway.submit import Submitter
from shoal.queue.interface import QueueLimits
from shoal.queue.memory import MemoryBroker, MemoryQueue
from shoal.settings import GatewaySettings
from shoal.wire.arrays import Array
from shoal.wire.envelope import (
    Inputs,
    ModelState,
    Outcome,
    Params,
    Result,
    Status,
    decode_cancel,
    decode_envelope,
    decode_inputs,
    encode,
)
from tests.conftest import until
from tests.support.pace import limit_s

ENTRY = Entry(
    id="m",
    tasks=["encode"],
    source="file:///x",
    outputs={"dense": Output(1)},
    profile=Profile(tokens_per_s=1000.0),
)
LINE_ITEMS = 24


class Place:
    """A gateway's submit path on one side of a queue, a worker's hand on the other."""

    def __init__(self, *, entry=ENTRY, workers=1, paced=False, **settings):
        broker = MemoryBroker(QueueLimits(max_queued_per_line=LINE_ITEMS))
        self.queue, self.hand = MemoryQueue(broker), MemoryQueue(broker)
        settings = GatewaySettings(**settings)
        self.fleet = fleet = Fleet()
        catalog = Snapshot([entry])
        lanes = parse_lanes(DEFAULT_LANES)
        self.book = BacklogBook(fleet, lambda: catalog, lanes, name="g")
        if not paced:
            self.book.window = lambda _line: math.inf
        self.submitter = Submitter(self.queue, fleet, self.book, settings)
        self.cancelled = []
        if workers:
            state = ModelState("m@1", "resident", bytes_per_token=1.0)
            fleet.on_status(encode(Status("w", [state], devices=workers)))

    async def __aenter__(self):
        await self.queue.listen(self.submitter.on_outcome)
        await self.hand.hear("cancel", lambda data: self.cancelled.append(decode_cancel(data)))
        return self

    async def __aexit__(self, *_):
        await self.hand.close()
        await self.queue.close()

    def job(self, n=1, *, chars=98, time_s=30.0, lane="interactive", tenant=None):
        """N inputs of chars + 2 tokens each: an item each, for a quantum has 100 tokens."""
        texts = Inputs(texts=["x" * chars] * n)
        deadline_s = wall() + time_s
        return Job("r", "encode", ENTRY, texts, Params(), lane, deadline_s, tenant=tenant)

    def files(self, sizes, *, partial=True):
        """A job of files that are no texts, one of each size."""
        blobs = Inputs(blobs=[b"x" * n for n in sizes])
        params = Params(partial=partial)
        return Job("r", "encode", ENTRY, blobs, params, "interactive", wall() + 30.0)

    def start(self, *arguments, **options):
        return asyncio.create_task(self.submitter.run(self.job(*arguments, **options)))

    async def take(self, n, lane="interactive"):
        """The envelopes of the next n items."""
        found = []
        await self.hand.pull(
            "m@1",
            lane,
            max_items=n,
            expires_s=limit_s(5.0),
            on_delivery=found.append,
            on_end=lambda: None,
        )
        await until(lambda: len(found) == n)
        for delivery in found:
            await delivery.ack()
        return [decode_envelope(delivery.data) for delivery in found]

    async def answer(self, envelope, failure=None, failures=None):
        """A row for each input that is not in `failures`: the length of its text or file."""
        inputs = decode_inputs(bytes(envelope.body))
        given = inputs.texts or inputs.blobs
        rows = [len(one) for i, one in enumerate(given) if i not in (failures or {})]
        block = np.array(rows, np.float32).reshape(-1, 1)
        result = msgspec.Raw(encode(Result({"dense": Array.of(block)})))
        outcome = (
            Outcome(envelope.item, failure=failure)
            if failure
            else Outcome(envelope.item, result=result, tokens=len(rows), failures=failures or {})
        )
        await self.hand.reply(envelope.reply, encode(outcome))

    def tokens(self):
        return self.book.message().tokens

    def waiting_items(self):
        lines = self.hand._broker.lines.values()
        return sum(len(line.waiting) for line in lines)
