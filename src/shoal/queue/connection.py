"""One connection to NATS: options, life cycle and the mapping of its errors.

Owns how Shoal connects (for ever, with jitter, quietly) and what happens to a NATS error at this
edge. Does not own streams or traffic.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from nats.errors import Error as NatsError
from nats.errors import NoServersError

from shoal.errors import QueueUnavailable
from shoal.queue.link import Link

log = logging.getLogger(__name__)

PENDING_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Address:
    """Where the broker is and how to prove who we are.

    url: of one server, or of several of a cluster with commas between.
    """

    url: str = "nats://127.0.0.1:4222"
    token: str | None = None
    creds: Path | None = None

    @property
    def servers(self) -> list[str]:
        """The addresses of the servers, one or more."""
        return [each.strip() for each in self.url.split(",") if each.strip()]


OnState = Callable[[], Awaitable[None]]


async def connect(address: Address, *, name: str, on_reconnected: OnState, wait_s: float) -> Link:
    """A connection that comes back by itself. Raises `QueueUnavailable` after `wait_s`."""
    link = Link()
    last = ""

    async def lost() -> None:
        if not link.is_closed:
            log.warning("lost the connection to the queue; trying again")

    async def failed(error: Exception) -> None:
        nonlocal last
        last = str(error) or repr(error)
        log.debug("queue connection: %r", error)

    async def back() -> None:
        log.info("connected to the queue again")
        await on_reconnected()

    try:
        async with asyncio.timeout(wait_s):  # the library itself would try for ever
            await link.connect(
                address.servers,
                name=name,
                token=address.token,
                user_credentials=str(address.creds) if address.creds else None,
                allow_reconnect=True,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.25,
                connect_timeout=max(1, int(wait_s)),
                ping_interval=5,
                max_outstanding_pings=2,
                pending_size=PENDING_BYTES,
                skip_subject_validation=True,  # every subject is made by `Topology`
                disconnected_cb=lost,
                reconnected_cb=back,
                error_cb=failed,
            )
    except (NatsError, NoServersError, OSError, TimeoutError) as error:
        await link.close()
        why = last or f"within {wait_s:.0f} s" if isinstance(error, TimeoutError) else error
        raise QueueUnavailable(f"no NATS server answers at {address.url}: {why}") from error
    return link


def check_connected(link: Link) -> None:
    """Raises `QueueUnavailable` at once, where a request would wait for its timeout."""
    if not link.is_connected:
        raise QueueUnavailable("the queue cannot be reached", retry_after_s=1.0)
