"""Names and settings of everything that Shoal keeps in NATS.

The one owner of the topology: every process calls the same idempotent `ensure_*`, so two builds
or two start-ups never disagree. Does not own connections or traffic.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    KeyValueConfig,
    ObjectStoreConfig,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import NotFoundError

from shoal.core.types import Lane
from shoal.queue.interface import Control, QueueLimits

_MUTABLE = ("subjects", "max_msgs_per_subject", "max_bytes", "duplicate_window", "allow_msg_ttl")
_UNSAFE = re.compile(r"[^a-z0-9_-]")
_ESCAPED = re.compile(r"(?:=[0-9A-F]{2})+")
CATALOG_VERSIONS = 16


@lru_cache(maxsize=4096)  # asked for every item
def token(name: str) -> str:
    """A model id as one subject token: injective, every other character as `=XX` hex."""
    return _UNSAFE.sub(lambda m: "".join(f"={b:02X}" for b in m[0].encode()), name)


def name_of(found: str) -> str:
    """The model whose `token` this is."""

    def unescape(match: re.Match[str]) -> str:
        return bytes.fromhex(match[0].replace("=", "")).decode(errors="replace")

    return _ESCAPED.sub(unescape, found)


@dataclass(frozen=True, slots=True)
class Topology:
    """One pool's stream, consumers and subjects."""

    pool: str
    storage: Literal["file", "memory"]
    replicas: int
    limits: QueueLimits
    lanes: tuple[Lane, ...]

    @property
    def stream(self) -> str:
        """The work stream."""
        return f"shoal-work-{self.pool}"

    def payloads_config(self) -> ObjectStoreConfig:
        """The object store of large bodies and results, while their requests are under way."""
        return self._object_store(
            f"shoal-payloads-{self.pool}",
            "Shoal: bodies and results over the inline limit",
            self.limits.payload_ttl_s,
            self.limits.payload_max_bytes,
        )

    def answers_config(self) -> ObjectStoreConfig:
        """The object store of large kept answers: however many, live work has its room."""
        return self._object_store(
            f"shoal-answers-{self.pool}",
            "Shoal: large answers kept for a client's retry",
            self.limits.answers_ttl_s,
            self.limits.answers_max_bytes,
        )

    def _object_store(
        self, bucket: str, description: str, ttl_s: float, max_bytes: int
    ) -> ObjectStoreConfig:
        return ObjectStoreConfig(
            bucket=bucket,
            description=description,
            ttl=ttl_s,
            max_bytes=max_bytes,
            storage=StorageType(self.storage),
            replicas=self.replicas,
        )

    @property
    def dead_stream(self) -> str:
        """The stream of dead letters."""
        return f"shoal-dead-{self.pool}"

    @property
    def dead_subjects(self) -> str:
        """All dead letters."""
        return f"shoal.dead.{self.pool}.*"

    def dead(self, model: str) -> str:
        """The subject of a model's dead letters."""
        return f"shoal.dead.{self.pool}.{token(model) or '_'}"

    def line(self, model: str, lane: Lane) -> str:
        """The subject of one (model, lane)."""
        return f"shoal.work.{self.pool}.{lane}.{token(model)}"

    @property
    def lines(self) -> str:
        """The subjects of all lines."""
        return f"shoal.work.{self.pool}.*.*"

    def line_of(self, subject: str) -> tuple[str, Lane]:
        """The (model, lane) whose `line` a subject is."""
        *_, lane, model = subject.split(".")
        return name_of(model), lane

    def consumer(self, model: str, lane: Lane) -> str:
        """The durable consumer of one (model, lane), shared by all workers."""
        return f"{lane}-{token(model)}"

    def control(self, control: Control) -> str:
        """The subject of a kind of control message."""
        return f"shoal.control.{self.pool}.{control}"

    def stream_config(self) -> StreamConfig:
        """Work-queue retention; a full line refuses new items instead of dropping old ones."""
        return StreamConfig(
            name=self.stream,
            description="Shoal: items waiting for workers",
            subjects=[self.lines],
            retention=RetentionPolicy.WORK_QUEUE,
            discard=DiscardPolicy.NEW,
            discard_new_per_subject=True,
            max_msgs_per_subject=self.limits.max_queued_per_line,
            max_bytes=self.limits.max_queued_bytes,
            storage=StorageType(self.storage),
            num_replicas=self.replicas,
            duplicate_window=self.limits.duplicate_window_s,
            allow_msg_ttl=True,
            allow_direct=True,
        )

    def dead_config(self) -> StreamConfig:
        """Bounded by number, bytes and age; the oldest letters make room."""
        return StreamConfig(
            name=self.dead_stream,
            description="Shoal: items that could not be served",
            subjects=[self.dead_subjects],
            retention=RetentionPolicy.LIMITS,
            discard=DiscardPolicy.OLD,
            max_msgs=self.limits.dead_max_letters,
            max_bytes=self.limits.dead_max_bytes,
            max_age=self.limits.dead_max_age_s,
            storage=StorageType(self.storage),
            num_replicas=self.replicas,
            allow_direct=True,
        )

    def kept_config(self) -> KeyValueConfig:
        """The bucket of kept records, each with a time of its own."""
        return KeyValueConfig(
            bucket=f"shoal-kept-{self.pool}",
            description="Shoal: answers kept for a client's retry",
            ttl=self.limits.kept_max_age_s,
            max_bytes=self.limits.kept_max_bytes,
            storage=StorageType(self.storage),
            replicas=self.replicas,
        )

    def leases_config(self) -> KeyValueConfig:
        """The bucket of leases, in memory: they outlive a worker, not the broker."""
        return KeyValueConfig(
            bucket=f"shoal-leases-{self.pool}",
            description="Shoal: short claims among workers",
            ttl=self.limits.leases_max_age_s,
            max_bytes=self.limits.leases_max_bytes,
            storage=StorageType.MEMORY,
            replicas=self.replicas,
        )

    def untouched_config(self) -> KeyValueConfig:
        """The bucket of deliveries that were no attempts; it outlives what the stream outlives."""
        return KeyValueConfig(
            bucket=f"shoal-untouched-{self.pool}",
            description="Shoal: how often items were given back untouched",
            ttl=self.limits.untouched_max_age_s,
            max_bytes=self.limits.untouched_max_bytes,
            storage=StorageType(self.storage),
            replicas=self.replicas,
        )

    def catalog_config(self) -> KeyValueConfig:
        """The bucket of the catalog, the same for all pools."""
        return KeyValueConfig(
            bucket="shoal-catalog",
            description="Shoal: the models of all pools",
            history=CATALOG_VERSIONS,
            max_value_size=self.limits.catalog_max_record_bytes,
            max_bytes=self.limits.catalog_max_bytes,
            storage=StorageType(self.storage),
            replicas=self.replicas,
        )

    def consumer_config(self, model: str, lane: Lane) -> ConsumerConfig:
        """Explicit acks, unlimited deliveries: the worker counts attempts and buries.

        The broker removes it after a long rest; whoever pulls from the line makes it again.
        """
        return ConsumerConfig(
            durable_name=self.consumer(model, lane),
            filter_subject=self.line(model, lane),
            ack_policy=AckPolicy.EXPLICIT,
            deliver_policy=DeliverPolicy.ALL,
            ack_wait=self.limits.ack_wait_s,
            max_deliver=-1,
            max_ack_pending=self.limits.max_held_per_line,
            inactive_threshold=self.limits.line_rest_s,
            max_waiting=self.limits.max_waiting_pulls,
            num_replicas=self.replicas,
            mem_storage=self.storage == "memory",
        )

    async def ensure_stream(self, js: JetStreamContext) -> Topology:
        """Creates the stream, or brings an older one to these settings.

        Storage and replicas are decided by who creates the stream: the topology that is returned
        has those of the stream as it is, so that a process with other flags does not fight it.
        """
        try:
            found = (await js.stream_info(self.stream)).config
        except NotFoundError:
            await js.add_stream(self.stream_config())
            return self
        actual = replace(
            self,
            storage="memory" if found.storage == StorageType.MEMORY else "file",
            replicas=found.num_replicas or 1,
        )
        config = actual.stream_config()
        if any(getattr(found, name) != getattr(config, name) for name in _MUTABLE):
            await js.update_stream(config)
        return actual

    async def ensure_line(self, js: JetStreamContext, model: str, lane: Lane) -> None:
        """Creates or updates the consumer of one line."""
        await js.add_consumer(self.stream, self.consumer_config(model, lane))

    async def remove_line(self, js: JetStreamContext, model: str, lane: Lane) -> None:
        """Removes the consumer of one line; nothing happens when there is none."""
        try:
            await js.delete_consumer(self.stream, self.consumer(model, lane))
        except NotFoundError:
            return
