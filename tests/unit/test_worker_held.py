"""What a worker holds until it is answered."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np

from shoal.clock import monotonic, wall
from shoal.errors import InputTooLong, RunFailed
from shoal.ipc.messages import ItemDone, RunItem
from shoal.wire.arrays import Array
from shoal.wire.envelope import (
    Failure,
    Result,
    decode_outcome,
    decode_result,
    encode,
)
from shoal.worker.held import Held, HeldItem
from tests.support.in_hand import delivered
from tests.support.pace import limit_s

ROWS = Result({"dense": Array.of(np.ones((2, 3), np.float32))})


def test_held_item_counts_what_failed_at_the_device_with_what_was_left_out_before():
    """Of six inputs two were left out and two failed when they ran: each is named by its place."""

    async def main():
        worker, _, delivery, envelope, got = await delivered(deadline_s=0.0)
        held = Held(worker, worker="w", ack_wait_s=60.0, max_attempts=3, inline_max=10_000)
        left_out = {0: InputTooLong("0", input_index=0), 3: InputTooLong("3", input_index=3)}
        item = HeldItem(delivery, envelope, 0.0, failures=left_out)
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


def test_held_item_that_was_stranded_ends_after_its_deadline(monkeypatch):
    """No task has it any more: keeping it alive ends, and its caller is told."""
    monkeypatch.setattr("shoal.worker.held.STRANDED_S", 0.0)

    async def main():
        worker, gateway, delivery, envelope, got = await delivered(deadline_s=wall() + 0.3)
        held = Held(worker, worker="w", ack_wait_s=0.3, max_attempts=3, inline_max=10_000)
        held.add(HeldItem(delivery, envelope, monotonic()))
        keeping = asyncio.create_task(held.keep_alive())
        await asyncio.wait_for(held.empty.wait(), limit_s(5))
        await asyncio.sleep(0)
        keeping.cancel()
        (outcome,) = map(decode_outcome, got)
        assert outcome.failure.code == "deadline_exceeded"
        assert not await gateway.counts()

    asyncio.run(main())
