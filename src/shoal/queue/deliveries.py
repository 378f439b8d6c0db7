"""A message that JetStream delivered, and what can be said of it.

Owns the words to the broker (ack, nak, in progress), each one core NATS message, and what a
delivery's reply subject tells: how often the item was delivered, and its place and time in the
stream, which name it. Does not own pulling (`jetstream`) or which deliveries were no attempts
(`untouched`).
"""

from __future__ import annotations

import logging

from nats.errors import Error as NatsError

from shoal.queue.link import Link
from shoal.queue.untouched import Untouched

log = logging.getLogger(__name__)


class JetStreamDelivery:
    """A pulled message; see `shoal.queue.interface.Delivery`."""

    __slots__ = ("_link", "_name", "_reply", "_untouched", "attempt", "data")

    def __init__(self, link: Link, untouched: Untouched, reply: bytes, data: bytes) -> None:
        self._link = link
        self._untouched = untouched
        self._reply = reply
        self.data = data
        # $JS.ACK.<stream>.<consumer>.<deliveries>.<sequence in the stream>.<sequence in the
        # consumer>.<time>... or, in a domain, each two tokens later.
        tokens = reply.split(b".", 10)
        at = 4 if tokens[4].isdigit() else 6
        self._name = b"%b-%b" % (tokens[at + 1], tokens[at + 3])
        self.attempt = int(tokens[at])
        if self.attempt > 1:
            self.attempt = max(1, self.attempt - untouched.count(self._name))

    async def ack(self) -> None:
        """The item is done."""
        self._say(b"+ACK")

    async def nak(self, delay_s: float = 0.0, *, untouched: bool = False) -> None:
        """The item is given back."""
        if untouched:
            self._untouched.add(self._name)
        self._say(b'-NAK {"delay":%d}' % int(delay_s * 1e9) if delay_s > 0 else b"-NAK")

    async def in_progress(self) -> None:
        """The item is being worked on."""
        self._say(b"+WPI")

    def give_back(self) -> None:
        """As `nak`, untouched, where nothing can wait."""
        self._untouched.add(self._name)
        self._say(b"-NAK")

    def _say(self, word: bytes) -> None:
        try:
            self._link.send(self._reply, word)
        except NatsError as error:  # the broker is away: the item comes back after ack_wait
            log.debug("could not send %r: %r", word, error)
