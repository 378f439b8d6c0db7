"""What a worker counts.

Owns the Prometheus objects of this process. Does not own the moments at which they move.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from shoal.core.types import Batch
from shoal.ipc.messages import Ran


class Metrics:
    """Batches, items and tokens, by model."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self._items = Counter("shoal_worker_items", "Items that ran.", ["model"], registry=r)
        self._failed = Counter(
            "shoal_worker_items_failed", "Items whose run failed.", ["model"], registry=r
        )
        self._tokens = Counter(
            "shoal_worker_tokens", "Useful tokens that ran.", ["model"], registry=r
        )
        self._padded = Counter(
            "shoal_worker_padded_tokens",
            "Tokens computed, padding included.",
            ["model"],
            registry=r,
        )
        self._run_s = Counter(
            "shoal_worker_device_seconds", "Device time of batches.", ["model"], registry=r
        )
        self._batch_items = Histogram(
            "shoal_worker_batch_items",
            "Items in a batch.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
            registry=r,
        )
        self.held = Gauge("shoal_worker_held_items", "Items in hand.", registry=r)

    def on_batch(self, batch: Batch, ran: Ran) -> None:
        """A batch has come back."""
        model = batch.model
        failed = sum(1 for done in ran.items if done.failure is not None)
        self._items.labels(model).inc(len(batch.items))
        if failed:
            self._failed.labels(model).inc(failed)
        self._tokens.labels(model).inc(sum(item.tokens for item in batch.items))
        self._padded.labels(model).inc(ran.padded_tokens)
        self._run_s.labels(model).inc(ran.run_s)
        self._batch_items.observe(len(batch.items))

    def serve(self, port: int) -> None:
        """Serves /metrics on loopback from a thread of its own."""
        start_http_server(port, addr="127.0.0.1", registry=self.registry)
