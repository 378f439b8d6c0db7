"""The payload store on a real nats-server, where others delete at the same time."""

from __future__ import annotations

import asyncio
import time

import nats
import pytest

from shoal.errors import QueueUnavailable
from tests.conftest import run
from tests.support.pace import limit_s
from tests.support.queues import opened

BODY = bytes(range(256)) * 4_000


def test_payload_whose_pieces_are_gone_is_refused_at_once(nats_server):
    """An object that is deleted between its description and its pieces: an error, not a wait."""

    async def main():
        async with opened("nats", nats_server) as pool:
            queue = await pool.queue()
            ref = await queue.payloads.put(BODY)
            bucket = pool.topology.payloads_config().bucket
            client = await nats.connect(nats_server.address.url, token=nats_server.address.token)
            await client.jetstream().purge_stream(f"OBJ_{bucket}", subject=f"$O.{bucket}.C.>")
            begun_s = time.monotonic()
            with pytest.raises(QueueUnavailable, match="gone"):
                await queue.payloads.get(ref)
            assert time.monotonic() - begun_s < limit_s(5)
            await client.close()

    run(main())


def test_payloads_leave_no_consumers_behind(nats_server):
    """Reads that are given up, or come to their end, cost the broker nothing afterwards."""

    async def main():
        async with opened("nats", nats_server) as pool:
            queue = await pool.queue()
            refs = [await queue.payloads.put(BODY) for _ in range(8)]
            reads = [asyncio.create_task(queue.payloads.get(ref)) for ref in refs]
            await asyncio.sleep(0)
            for read in reads[::2]:
                read.cancel()
            done = await asyncio.gather(*reads, return_exceptions=True)
            assert [one == BODY for one in done] == [False, True] * 4
            client = await nats.connect(nats_server.address.url, token=nats_server.address.token)
            bucket = pool.topology.payloads_config().bucket
            info = await client.jetstream().stream_info(f"OBJ_{bucket}")
            assert info.state.consumer_count == 0
            await client.close()

    run(main())


@pytest.mark.parametrize("kind", ["nats", "memory"])
def test_payloads_of_live_work_have_room_however_many_answers_are_kept(nats_server, kind):
    """Kept answers have a store of their own; when it is full, the refusal says what is full."""

    async def main():
        async with opened(kind, nats_server) as pool:
            queue = await pool.queue()
            with pytest.raises(QueueUnavailable, match="full") as full:  # noqa: PT012
                for _ in range(40):
                    await queue.answers.put(BODY)
            assert full.value.retry_after_s
            ref = await queue.payloads.put(BODY)
            assert await queue.payloads.get(ref) == BODY

    run(main(), timeout_s=60)
