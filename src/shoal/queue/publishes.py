"""Items on their way to the broker, kept until it has confirmed them.

Owns the acks, which come to one shared inbox, sending again what a dying broker may have taken
along, and failing what stays unconfirmed. The broker knows an item by its id: what it has already,
it takes only once. Does not own the connection (`link`) or subjects (`topology`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass

from nats.errors import Error as NatsError
from nats.js.errors import APIError

from shoal.clock import monotonic
from shoal.errors import QueueFull, QueueUnavailable, ShoalError
from shoal.queue.interface import OnRefused
from shoal.queue.link import Link

log = logging.getLogger(__name__)

NO_RESPONDERS = b"NATS/1.0 503"
_LINE_IS_FULL = 10077  # "maximum messages per subject exceeded"
_AGAIN_S = 2.0
MAX_UNCONFIRMED = 65_536
MAX_UNCONFIRMED_BYTES = 256 * 1024 * 1024
_HEADERS = b"NATS/1.0\r\nNats-Msg-Id:%b\r\nNats-TTL:%ds\r\n\r\n"


@dataclass(slots=True)
class _Publish:
    """An item on its way. tried_s: when it was last sent; again: it was sent more than once."""

    on_refused: OnRefused
    sent_s: float
    subject: bytes
    data: bytes
    headers: bytes
    tried_s: float
    again: bool = False


class Publishes:
    """Publishes through `link`; acks come to `inbox` with a number behind it (see `on_ack`)."""

    def __init__(
        self,
        link: Link,
        inbox: bytes,
        *,
        timeout_s: float,
        max_unconfirmed: int = MAX_UNCONFIRMED,
        max_bytes: int = MAX_UNCONFIRMED_BYTES,
    ) -> None:
        self._max_unconfirmed = max_unconfirmed
        self._max_bytes = max_bytes
        self._n_bytes = 0
        self._link = link
        self._inbox = inbox
        self._timeout_s = timeout_s
        self._number = 0
        self._unconfirmed: dict[bytes, _Publish] = {}

    def __len__(self) -> int:
        return len(self._unconfirmed)

    def send(
        self, subject: bytes, data: bytes, *, item_id: str, ttl_s: float, on_refused: OnRefused
    ) -> None:
        """Sends an item. Raises `QueueUnavailable` or `QueueFull` when that is known to fail."""
        if not self._link.is_connected:
            raise QueueUnavailable("the queue cannot be reached", retry_after_s=1.0)
        full = len(self._unconfirmed) >= self._max_unconfirmed
        if full or self._n_bytes + len(data) > self._max_bytes:
            raise QueueFull("the queue is behind with confirming items", retry_after_s=1.0)
        self._number += 1
        reply, now_s = b"%b%d" % (self._inbox, self._number), monotonic()
        headers = _HEADERS % (item_id.encode(), max(1, int(ttl_s) + 1))
        self._unconfirmed[reply] = _Publish(on_refused, now_s, subject, data, headers, now_s)
        self._n_bytes += len(data)
        try:
            self._link.send(subject, data, reply, headers)
        except NatsError as error:
            self._forget(reply)
            raise QueueUnavailable(f"the queue did not take the item: {error}") from error

    def _forget(self, reply: bytes) -> None:
        self._n_bytes -= len(self._unconfirmed.pop(reply).data)

    def on_ack(self, subject: bytes, _: bytes, headers: bytes, data: bytes) -> None:
        """The broker's word on one item."""
        publish = self._unconfirmed.get(subject)
        away = headers.startswith(NO_RESPONDERS)
        if publish is None or (away and publish.again):
            return  # what was sent before may have been stored: it is tried until it is too late
        self._forget(subject)
        if away:
            publish.on_refused(QueueUnavailable("the queue has no stream now", retry_after_s=1.0))
        elif b'"error"' in data:
            publish.on_refused(_refusal(data))

    async def sweep(self) -> None:
        """Sends again what nobody confirms, and fails it in the end; runs for ever."""
        while True:
            await asyncio.sleep(self._timeout_s / 10)
            now_s = monotonic()
            # Insertion order is age order, so the first young one ends the search.
            while self._unconfirmed:
                reply, publish = next(iter(self._unconfirmed.items()))
                if publish.sent_s > now_s - self._timeout_s:
                    break
                self._forget(reply)
                late = "the queue did not confirm the item in time"
                publish.on_refused(QueueUnavailable(late, retry_after_s=1.0))
            self.again(now_s - _AGAIN_S)

    def again(self, before_s: float) -> None:
        """Sends again what was last sent before a moment."""
        if not self._link.is_connected:
            return
        now_s = monotonic()
        for reply, publish in self._unconfirmed.items():
            if publish.sent_s > before_s:
                break
            if publish.tried_s <= before_s:
                publish.again, publish.tried_s = True, now_s
                try:
                    self._link.send(publish.subject, publish.data, reply, publish.headers)
                except NatsError as error:
                    log.debug("publishing again: %r", error)


def _refusal(data: bytes) -> ShoalError:
    """The error of a publish that JetStream refused."""
    error = APIError(**json.loads(data).get("error", {}))
    if error.err_code == _LINE_IS_FULL:
        return QueueFull("this model's queue is full", retry_after_s=1.0)
    return QueueUnavailable(f"the queue refused the item: {error.description}", retry_after_s=1.0)
