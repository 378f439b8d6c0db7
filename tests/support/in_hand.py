"""An item in a worker's hand, on a queue inside the process."""

from __future__ import annotations

from shoal.queue.interface import QueueLimits
from shoal.queue.memory import MemoryBroker, MemoryQueue
from shoal.wire.envelope import Envelope, Params, encode


async def delivered(*, deadline_s):
    """A worker's and a gateway's queue, an item in the worker's hand, and what the gateway gets."""
    broker = MemoryBroker(QueueLimits())
    worker, gateway = MemoryQueue(broker), MemoryQueue(broker)
    got, deliveries = [], []
    await gateway.listen(got.append)
    envelope = Envelope(
        *("i", "r", 0, 1, "encode", "m", "1", "interactive", 1, 6, deadline_s, 0.0, gateway.inbox),
        params=Params(partial=True),
    )
    await gateway.submit(
        *("m@1", "interactive", encode(envelope)),
        item_id="i",
        ttl_s=60.0,
        on_refused=got.append,
    )
    await worker.pull(
        *("m@1", "interactive"),
        max_items=1,
        expires_s=60.0,
        on_delivery=deliveries.append,
        on_end=lambda: None,
    )
    return worker, gateway, deliveries[0], envelope, got
