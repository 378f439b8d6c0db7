"""Dead letters in a NATS stream of their own.

Owns keeping, reading and dropping them. Does not own when an item is buried
(`shoal.core.delivery`) or what is done with a letter (`shoal.cli.dead`).
"""

from __future__ import annotations

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import BadRequestError, NotFoundError

from shoal.errors import QueueUnavailable
from shoal.queue.interface import Buried
from shoal.queue.topology import Topology
from shoal.wire.envelope import DeadLetter, UnreadableMessage, decode_dead_letter, encode


class NatsDeadLetters:
    """The `DeadLetters` contract on a stream."""

    def __init__(self, js: JetStreamContext, topology: Topology) -> None:
        self._js = js
        self._topology = topology

    async def ensure(self) -> None:
        """Creates the stream, or finds it."""
        try:
            await self._js.add_stream(self._topology.dead_config())
        except BadRequestError:  # it is there with other settings
            await self._js.stream_info(self._topology.dead_stream)

    async def bury(self, letter: DeadLetter) -> None:
        """Keeps a letter."""
        try:
            await self._js.publish(self._topology.dead(letter.model), encode(letter))
        except (NatsError, TimeoutError) as error:
            raise QueueUnavailable(f"the dead letter could not be kept: {error}") from error

    async def read(self, first: int = 0, most: int = 1000) -> list[Buried]:
        """Letters in the order of their numbers; what is no letter of ours is passed over."""
        found: list[Buried] = []
        stream, everything = self._topology.dead_stream, self._topology.dead_subjects
        number = max(1, first)
        while len(found) < most:
            try:
                raw = await self._js.get_msg(stream, number, subject=everything, next=True)
            except NotFoundError:
                break
            except (NatsError, TimeoutError) as error:
                raise QueueUnavailable(f"dead letters cannot be read: {error}") from error
            number = (raw.seq or number) + 1
            try:
                found.append(Buried(number - 1, decode_dead_letter(raw.data or b"")))
            except UnreadableMessage:
                continue
        return found

    async def drop(self, number: int) -> bool:
        """Forgets a letter."""
        try:
            return bool(await self._js.delete_msg(self._topology.dead_stream, number))
        except (NotFoundError, BadRequestError):  # the number was never given, or is gone
            return False
        except (NatsError, TimeoutError) as error:
            raise QueueUnavailable(f"the dead letter cannot be dropped: {error}") from error
