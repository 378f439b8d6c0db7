"""The queue that the settings speak of.

Owns the step from settings to an open queue, the same for every process.
"""

from __future__ import annotations

from shoal.core.lanes import parse_lanes
from shoal.queue.connection import Address
from shoal.queue.interface import Queue, QueueLimits
from shoal.queue.jetstream import JetStreamQueue
from shoal.queue.topology import Topology
from shoal.settings import QueueSettings

DEFAULT_URL = "nats://127.0.0.1:4222"


async def open_queue(settings: QueueSettings, *, name: str) -> Queue:
    """Connects and makes the topology. Raises `QueueUnavailable`."""
    address = Address(
        settings.nats_url or DEFAULT_URL, token=settings.nats_token, creds=settings.nats_creds
    )
    limits = QueueLimits(
        max_queued_per_line=settings.max_queued_per_model, ack_wait_s=settings.ack_wait_s
    )
    lanes = tuple(rule.name for rule in parse_lanes(settings.lanes))
    topology = Topology(settings.pool, settings.storage, settings.replicas, limits, lanes)
    return await JetStreamQueue.open(address, topology, name=name)
