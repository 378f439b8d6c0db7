"""The queue that the settings speak of.

Owns the step from settings to an open queue, the same for every process.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError

from shoal.core.lanes import parse_lanes
from shoal.errors import QueueUnavailable, SettingsError
from shoal.queue.connection import Address
from shoal.queue.interface import Queue, QueueLimits
from shoal.queue.jetstream import JetStreamQueue
from shoal.queue.topology import Topology
from shoal.settings import QueueSettings
from shoal.telemetry import without_password

DEFAULT_URL = "nats://127.0.0.1:4222"


async def open_queue(settings: QueueSettings, *, name: str) -> Queue:
    """Connects and makes the topology. Raises `QueueUnavailable`."""
    return await JetStreamQueue.open(_address(settings), _topology(settings), name=name)


async def find_queue(settings: QueueSettings, *, name: str, wait_s: float = 5.0) -> Queue:
    """As `open_queue`, where a process that serves made the pool before; nothing is changed there.

    It tries once, for a person waits for it. Raises `QueueUnavailable` when the broker
    does not answer in time, `SettingsError` when it has no such pool.
    """
    address, topology = _address(settings), _topology(settings)
    client, faults, shown = Client(), [""], without_password(address.url)

    async def failed(error: Exception) -> None:
        faults[0] = str(error)

    try:
        async with asyncio.timeout(wait_s):
            await client.connect(
                address.servers,
                name=name,
                token=address.token,
                user_credentials=str(address.creds) if address.creds else None,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0.1,
                error_cb=failed,
            )
            found = (await client.jetstream().stream_info(topology.stream)).config
    except NotFoundError as error:
        raise SettingsError(f"pool: the broker at {shown} has no pool `{settings.pool}`") from error
    except (NatsError, OSError, TimeoutError) as error:
        said = faults[0] or str(error) or "no answer in time"
        raise QueueUnavailable(f"no broker answers at {shown}: {said}") from error
    finally:
        await client.close()
    bound = found.max_msgs_per_subject or topology.limits.max_queued_per_line
    limits = replace(
        topology.limits,
        max_queued_per_line=bound,
        max_queued_bytes=found.max_bytes or topology.limits.max_queued_bytes,
    )
    return await JetStreamQueue.open(address, replace(topology, limits=limits), name=name)


def _address(settings: QueueSettings) -> Address:
    return Address(
        settings.nats_url or DEFAULT_URL, token=settings.nats_token, creds=settings.nats_creds
    )


def _topology(settings: QueueSettings) -> Topology:
    limits = QueueLimits(
        max_queued_per_line=settings.max_queued_per_model,
        max_queued_bytes=settings.max_queued_bytes,
        ack_wait_s=settings.ack_wait_s,
    )
    lanes = tuple(rule.name for rule in parse_lanes(settings.lanes))
    return Topology(settings.pool, settings.storage, settings.replicas, limits, lanes)
