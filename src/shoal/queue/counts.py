"""How many items are in each line, asked of the broker.

Owns the one question (the counts of a stream by subject) and its pages. Does not own what is done
with the answer.
"""

from __future__ import annotations

import msgspec
from nats.errors import Error as NatsError

from shoal.core.types import Lane
from shoal.errors import QueueUnavailable
from shoal.queue.connection import check_connected
from shoal.queue.link import Link
from shoal.queue.topology import Topology

_ANSWER_S = 5.0


class _Question(msgspec.Struct, frozen=True):
    subjects_filter: str
    offset: int


class _State(msgspec.Struct, frozen=True):
    subjects: dict[str, int] = {}


class _Error(msgspec.Struct, frozen=True):
    description: str = "no reason given"


class _Answer(msgspec.Struct, frozen=True):
    """total: subjects in all; the broker tells a hundred thousand at a time."""

    state: _State = _State()
    total: int = 0
    error: _Error | None = None


async def line_counts(link: Link, topology: Topology) -> dict[tuple[str, Lane], int]:
    """Items of each line that has some, whoever made it. Raises `QueueUnavailable`."""
    subject = f"$JS.API.STREAM.INFO.{topology.stream}"
    found: dict[str, int] = {}
    offset = 0
    while True:
        check_connected(link)
        question = msgspec.json.encode(_Question(topology.lines, offset))
        try:
            message = await link.request(subject, question, timeout=_ANSWER_S)
            answer = msgspec.json.decode(message.data, type=_Answer)
        except (NatsError, TimeoutError, msgspec.MsgspecError) as error:
            raise QueueUnavailable(
                f"lines cannot be counted: {error}", retry_after_s=1.0
            ) from error
        if answer.error is not None:
            raise QueueUnavailable(f"lines cannot be counted: {answer.error.description}")
        found |= answer.state.subjects
        offset += len(answer.state.subjects)
        if not answer.state.subjects or offset >= answer.total:
            return {topology.line_of(name): count for name, count in found.items()}
