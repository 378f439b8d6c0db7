"""`shoal dead replay`: dead letters sent back into their lines, and what became of them.

Owns a replay's fresh item, its wait, and dropping the letter after a good outcome. The worker does
not bury a replayed item again (`Envelope.letter`): the letter is still there. Does not own which
letters are meant (`letters`).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

import msgspec
from msgspec import structs

from shoal import clock
from shoal.cli.letters import Filters, envelope_of, inputs_of, plain, select
from shoal.cli.reach import Reach, opened
from shoal.errors import DeadlineExceeded, ShoalError
from shoal.queue.interface import Buried, Queue
from shoal.settings import QueueSettings
from shoal.wire.envelope import (
    EMPTY,
    Cancel,
    Envelope,
    Outcome,
    UnreadableMessage,
    decode_outcome,
    encode,
)

AT_ONCE = 16


def replay_letters(
    reach: Reach,
    wanted: Sequence[int] | Filters,
    limit: int | None,
    *,
    timeout_s: float,
    keep: bool,
) -> int:
    """Sends letters again and prints what became of each; exit code 1 when any failed."""

    async def work() -> int:
        async with opened(reach) as queue:
            letters, _ = await select(queue, wanted, limit)
            replay = Replay(queue, timeout_s=timeout_s, keep=keep)
            await queue.listen(replay.on_outcome)
            for at in range(0, len(letters), AT_ONCE):
                part = letters[at : at + AT_ONCE]
                await asyncio.gather(*(replay.report(found) for found in part))
        print(f"{len(letters) - replay.n_failed} of {len(letters)} served")
        return 1 if replay.n_failed else 0

    return asyncio.run(work())


class Replay:
    """Items under way; at most `AT_ONCE` of them."""

    def __init__(self, queue: Queue, *, timeout_s: float, keep: bool) -> None:
        self._queue = queue
        self._timeout_s = timeout_s
        self._keep = keep
        self._waiting: dict[str, asyncio.Future[Outcome]] = {}
        self.n_failed = 0

    def on_outcome(self, data: bytes) -> None:
        """Takes an outcome in; the first of each item counts."""
        try:
            outcome = decode_outcome(data)
        except UnreadableMessage:
            return  # the replay's time will be over, and says so
        future = self._waiting.get(outcome.item)
        if future is not None and not future.done():
            future.set_result(outcome)

    async def report(self, found: Buried) -> None:
        """Replays one letter and prints what became of it."""
        try:
            outcome = await self._run(found)
        except UnreadableMessage as error:
            self.n_failed += 1
            print(f"{found.number}  cannot be replayed: {plain(str(error))}")
            return
        except ShoalError as error:
            self.n_failed += 1
            print(f"{found.number}  {error.code}: {plain(error.message)}; kept")
            return
        kept = "kept" if self._keep else "dropped"
        if not self._keep:
            await self._queue.dead.drop(found.number)
        print(f"{found.number}  ok: {outcome.tokens} tokens by {plain(outcome.worker)}; {kept}")

    async def _run(self, found: Buried) -> Outcome:
        """The good outcome of a letter's item. Raises the bad one."""
        queue, old = self._queue, envelope_of(found.letter)
        body = encode(await inputs_of(queue, found.letter, old))
        payload = None
        if len(body) > QueueSettings.inline_max_bytes:
            payload = await queue.payloads.put(body)
        request = f"replay-{uuid.uuid4().hex}"
        envelope = structs.replace(
            old,
            item=f"{request}.0",
            request=request,
            index=0,
            of=1,
            submitted_s=clock.wall(),
            deadline_s=clock.wall() + self._timeout_s,
            reply=queue.inbox,
            body=EMPTY if payload else msgspec.Raw(body),
            payload=payload,
            letter=found.number,
        )
        try:
            outcome = await self._outcome(envelope)
            if outcome.payload is not None:
                await queue.payloads.delete(outcome.payload)
        finally:
            if payload is not None:
                await queue.payloads.delete(payload)
        if outcome.failure is not None:
            raise outcome.failure.error()
        return outcome

    async def _outcome(self, envelope: Envelope) -> Outcome:
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[envelope.item] = future

        def refused(error: ShoalError) -> None:
            if not future.done():
                future.set_exception(error)

        try:
            await self._queue.submit(
                f"{envelope.model}@{envelope.revision}",
                envelope.lane,
                encode(envelope),
                item_id=envelope.item,
                ttl_s=self._timeout_s,
                on_refused=refused,
            )
            async with asyncio.timeout(self._timeout_s):
                return await future
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no answer within {self._timeout_s:g} s; does a worker serve "
                f"`{envelope.model}` in lane `{envelope.lane}`?"
            ) from error
        finally:
            del self._waiting[envelope.item]
            if not future.done() or future.cancelled():
                await self._queue.tell("cancel", encode(Cancel(envelope.request)))
