"""nats-py's client with a shorter way in and out for the messages of the hot path.

Owns framing of what is sent, one write for all that is sent in one turn of the event loop, and
reading messages straight into their handlers. nats-py keeps the rest: connecting, authentication,
TLS, pings, reconnecting with its subscriptions, and the requests of its JetStream API; its way of
handling one message (a regular expression, an object, a queue and a task for each) costs several
times what the rest of receiving it does. Its outgoing buffer stays the only one, so that what it
sends and what is sent here keep their order and outlive a reconnection alike. Does not own
subjects or the meaning of messages (`jetstream`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import (
    ConnectionClosedError,
    ConnectionDrainingError,
    MaxPayloadError,
    OutboundBufferLimitError,
    ProtocolError,
)
from nats.protocol.parser import Parser

log = logging.getLogger(__name__)

# subject, reply, headers as they stand on the wire (empty without), data
OnMessage = Callable[[bytes, bytes, bytes, bytes], None]

_CRLF: Final = b"\r\n"
_MESSAGES: Final = (b"MSG", b"HMSG")
_ON_ITS_WAY_S: Final = 5.0
_MAX_LINE_BYTES: Final = 1024 * 1024
_MAX_JOINED_BYTES: Final = 256 * 1024
_MAX_MESSAGE_BYTES: Final = 256 * 1024 * 1024  # well above the most that a broker can be set to


class Link(Client):  # type: ignore[misc]
    """One connection. Connect it with `Client.connect`, then `send` and `listen`."""

    def __init__(self) -> None:
        super().__init__()
        self._handlers: dict[bytes, OnMessage] = {}
        self._ps: Parser = _Reader(self, self._handlers)
        self._pending: list[bytes] = []
        self._is_flush_due = False

    async def listen(self, subject: str, on_message: OnMessage) -> Subscription:
        """Calls `on_message` for every message of a subject, in the turn that reads it."""

        async def late(msg: Msg) -> None:
            """Never called: the reader finds the handler first. nats-py wants one."""

        self._handlers[b"%d" % (self._sid + 1)] = on_message
        return await self.subscribe(subject, cb=late)

    async def silence(self, subscription: Subscription) -> None:
        """Listens no more. What is on its way already is still handled. Raises a NATS `Error`."""
        await subscription.unsubscribe()
        number = b"%d" % subscription._id  # noqa: SLF001 - it has no other name for it
        asyncio.get_running_loop().call_later(_ON_ITS_WAY_S, self._handlers.pop, number, None)

    async def close(self) -> None:
        """Leaves. What was kept for a connection that is away is dropped with it.

        nats-py would write it to the closed transport, where uvloop raises.
        """
        if not self.is_connected:
            self._pending.clear()
            self._pending_data_size = 0
        await super().close()

    def send(self, subject: bytes, data: bytes, reply: bytes = b"", headers: bytes = b"") -> None:
        """Puts a message on its way; it leaves when this turn of the event loop ends.

        headers: the whole block, from `NATS/1.0` to the empty line. Raises what `publish` would.
        """
        size = len(data)
        if not self.is_connected:
            self._check_state()
        if size > self._max_payload:
            raise MaxPayloadError
        if self._pending_data_size + size > self._max_pending_size:
            raise OutboundBufferLimitError
        if headers:
            n = len(headers)
            line = b"HPUB %b %b %d %d\r\n%b%b\r\n"
            message = line % (subject, reply, n, n + size, headers, data)
        else:
            message = b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, size, data)
        self._pending.append(message)
        self._pending_data_size += len(message)
        if self._pending_data_size > _MAX_JOINED_BYTES:
            self._flush_now()
        elif not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush_turn)

    def _check_state(self) -> None:
        """While a connection is being made again, what is sent is kept for it."""
        if self.is_closed:
            raise ConnectionClosedError
        if self.is_draining_pubs:
            raise ConnectionDrainingError

    def _flush_turn(self) -> None:
        self._is_flush_due = False
        self._flush_now()

    def _flush_now(self) -> None:
        """Writes what is pending, unless there is no connection or the broker does not read."""
        if not self.is_connected or not self._pending or not self._transport:
            return
        writer = getattr(self._transport, "_io_writer", None)  # a WebSocket has none
        if writer and writer.transport.get_write_buffer_size() > self._max_pending_size:
            return
        pending, self._pending = self._pending, []
        self._pending_data_size = 0
        self._transport.write(pending[0] if len(pending) == 1 else b"".join(pending))


class _Reader(Parser):  # type: ignore[misc]
    """Takes messages apart; every other line of the protocol goes to nats-py's parser."""

    def __init__(self, link: Link, handlers: Mapping[bytes, OnMessage]) -> None:
        super().__init__(link)
        self._handlers = handlers

    def reset(self) -> None:
        """Forgets what was half read; the connection is another one."""
        super().reset()
        self._parts: list[bytes] = []
        self._have_bytes = 0
        self._need_bytes = 0

    async def parse(self, data: bytes = b"") -> None:
        """Takes in what was read, and calls the handlers of the messages that are complete.

        Raises `ProtocolError`, after which nats-py connects anew.
        """
        if self._parts:
            self._parts.append(data)
            self._have_bytes += len(data)
            if self._have_bytes < self._need_bytes:
                return
            data, self._parts = b"".join(self._parts), []
        try:
            at = await self._read(data)
        except (ValueError, IndexError) as error:
            raise ProtocolError from error
        if at < len(data):
            self._parts.append(data[at:])
            self._have_bytes = len(data) - at

    async def _read(self, data: bytes) -> int:
        """Reads all complete lines and messages; where the first incomplete one begins."""
        at, end = 0, len(data)
        while at < end:
            line_end = data.find(_CRLF, at)
            if line_end < 0:
                if end - at > _MAX_LINE_BYTES:
                    raise ProtocolError
                self._need_bytes = 0
                return at
            words = data[at:line_end].split()
            stop = line_end + 2
            handler = None
            if words and words[0] in _MESSAGES:
                size = int(words[-1])
                if not 0 <= size <= _MAX_MESSAGE_BYTES:
                    raise ProtocolError
                stop += size + 2
                if stop > end:
                    self._need_bytes = stop - at
                    return at
                handler = self._handlers.get(words[2])
            if handler is None:
                await super().parse(data[at:stop])
            else:
                _handle(handler, words, data[line_end + 2 : stop - 2])
            at = stop
        return at


def _handle(handler: OnMessage, words: list[bytes], data: bytes) -> None:
    """Calls a handler with a message. words: its line, MSG or HMSG."""
    headers = b""
    with_reply = 5
    if words[0] == b"HMSG":
        size = int(words[-2])
        headers, data = data[:size], data[size:]
        with_reply = 6
    reply = words[3] if len(words) == with_reply else b""
    try:
        handler(words[1], reply, headers, data)
    except Exception:  # task root: one message
        log.exception("a message to %r could not be handled", words[1])
