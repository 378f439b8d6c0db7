"""What a worker holds until it is answered."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np

from shoal.errors import InputTooLong, RunFailed
from shoal.ipc.messages import ItemDone, RunItem
from shoal.queue.interface import QueueLimits
from shoal.queue.memory import MemoryBroker, MemoryQueue
from shoal.wire.arrays import Array
from shoal.wire.envelope import (
    Envelope,
    Failure,
    Params,
    Result,
    decode_outcome,
    decode_result,
    encode,
)
from shoal.worker.held import Held, HeldItem

ROWS = Result({"dense": Array.of(np.ones((2, 3), np.float32))})


def test_held_item_counts_what_failed_at_the_device_with_what_was_left_out_before():
    """Of six inputs two were left out and two failed when they ran: each is named by its place."""

    async def main():
        broker = MemoryBroker(QueueLimits())
        worker, gateway = MemoryQueue(broker), MemoryQueue(broker)
        got, deliveries = [], []
        await gateway.listen(got.append)
        envelope = Envelope(
            *("i", "r", 0, 1, "encode", "m", "1", "interactive", 1, 6, 0.0, 0.0, gateway.inbox),
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
        held = Held(worker, worker="w", ack_wait_s=60.0, max_attempts=3, inline_max=10_000)
        left_out = {0: InputTooLong("0", input_index=0), 3: InputTooLong("3", input_index=3)}
        item = HeldItem(deliveries[0], envelope, 0.0, failures=left_out)
        item.run_item = RunItem("i", "encode", [1, 1, 1, 1])  # inputs 1, 2, 4 and 5
        held.add(item)
        failed = {
            0: Failure.of(RunFailed("1", input_index=0)),
            2: Failure.of(RunFailed("4", input_index=2)),
        }
        await held.succeed(ItemDone("i", msgspec.Raw(encode(ROWS)), failures=failed), 0.1)
        for _ in range(5):
            await asyncio.sleep(0)
        (outcome,) = map(decode_outcome, got)
        assert sorted(outcome.failures) == [0, 1, 3, 4]
        for at, failure in outcome.failures.items():
            assert (failure.message, failure.input_index) == (str(at), at)
        assert decode_result(bytes(outcome.result)) == ROWS

    asyncio.run(main())
