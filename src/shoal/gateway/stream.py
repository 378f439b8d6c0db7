"""An answer that is sent while it grows, as server-sent events.

Owns the head, the frames and the end of such an answer. The head waits for the first event, so
that an error before it is an ordinary answer with its status. A reader that is slow holds nothing
up: the next events are asked for once the server's buffer has room. Does not own the shape of any
event (`telling`) or what has grown (`growth`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from shoal import clock
from shoal.errors import ShoalError
from shoal.gateway.failures import NativeError, OpenAIError, Shape, error_body
from shoal.gateway.forms import JSON
from shoal.gateway.jobs import Grew, Grown
from shoal.gateway.telling import Telling
from shoal.gateway.timing import Speed, server_timing, speed_of
from shoal.gateway.visit import Visit
from shoal.wire.envelope import Timing
from shoal.wire.generation import Generated

CONTENT_TYPE = b"text/event-stream"


class NativeStreamError(msgspec.Struct):
    """The last event of a stream that failed."""

    error: NativeError


class Told:
    """What has been told of a stream. texts: those that are whole, by index."""

    def __init__(self, visit: Visit, telling: Telling) -> None:
        self._visit = visit
        self._telling = telling
        self._texts: dict[int, Generated] = {}
        self._first_token_s = 0.0
        self._timing = Timing()

    @property
    def texts(self) -> list[Generated]:
        """The whole texts, in the order of their inputs."""
        return [self._texts[index] for index in sorted(self._texts)]

    @property
    def speed(self) -> Speed:
        """As far as it is known."""
        return speed_of(self.texts, self._first_token_s)

    async def tell(self, events: AsyncIterator[Grown]) -> bytes:
        """Sends all that happens as it happens; returns what ends the answer."""
        async for index, event in events:
            if not self._first_token_s:
                self._first_token_s = clock.monotonic() - self._visit.started_s
            self._timing = max(self._timing, event.timing, key=lambda t: t.queue_s + t.run_s)
            if isinstance(event, Grew):
                made = self._telling.piece(index, event.piece)
            else:
                self._texts[index] = event.generated
                made = self._telling.end(index, event.generated)
            if made:
                await self._send(b"".join(map(_frame, made)))
        last = b"".join(map(_frame, self._telling.last(self.texts)))
        timing = server_timing(self._timing, self.speed)
        if self._visit.streamed_bytes is None:  # nothing was worth an event until the end
            await self._send(b"")
        return b"%b: server-timing %b\n\n%b" % (last, timing, self._telling.done)

    async def _send(self, frames: bytes) -> None:
        """Sends frames, behind the head where they are the first."""
        visit = self._visit
        if visit.streamed_bytes is None:
            visit.streamed_bytes = 0
            headers = [
                (b"content-type", CONTENT_TYPE),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),  # a proxy that waits for the end would spoil it
                (b"x-request-id", visit.id.encode()),
                (b"server-timing", server_timing(self._timing, self.speed)),
            ]
            await visit.send({"type": "http.response.start", "status": 200, "headers": headers})
        visit.streamed_bytes += len(frames)
        if visit.short_way is not None:
            visit.short_way.streamed(len(frames))
        await visit.send({"type": "http.response.body", "body": frames, "more_body": True})


def _frame(event: msgspec.Struct) -> bytes:
    return b"data: %b\n\n" % JSON.encode(event)


def error_frame(error: ShoalError, shape: Shape, request_id: str) -> bytes:
    """The event that ends a stream which had begun when the error came."""
    body = error_body(error, shape, request_id)
    return _frame(body if isinstance(body, OpenAIError) else NativeStreamError(body))
