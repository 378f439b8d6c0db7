"""Which running cluster a command speaks to, and the way there.

Owns opening the queue that an operator's options mean. Does not own the options (`options`), nor
where a `shoal serve` writes down its broker's address (`access`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.cli.access import read_access
from shoal.configuration import load
from shoal.queue.interface import Queue
from shoal.queue.opening import find_queue
from shoal.settings import OperatorSettings, environment


@dataclass(frozen=True, slots=True)
class Reach:
    """Which cluster is meant, by flags; what is left out comes from the environment."""

    nats_url: str | None
    pool: str | None
    data_dir: Path | None

    def settings(self) -> OperatorSettings:
        """The flags with what the environment says. Raises `SettingsError`."""
        flags = {"nats_url": self.nats_url, "pool": self.pool, "data_dir": self.data_dir}
        return load(OperatorSettings, flags, environment())


@asynccontextmanager
async def opened(reach: Reach) -> AsyncIterator[Queue]:
    """The queue of the cluster that is meant. Raises `SettingsError`, `QueueUnavailable`."""
    settings = reach.settings()
    if settings.nats_url is None:
        address = read_access(settings.data_dir)
        settings = replace(settings, nats_url=address.url, nats_token=address.token)
    queue = await find_queue(settings, name="shoal command")
    try:
        yield queue
    finally:
        await queue.close()
