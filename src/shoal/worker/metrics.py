"""What a worker counts.

Owns the Prometheus objects of this process. Does not own the moments at which they move.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from shoal.core.types import Batch
from shoal.ipc.messages import Ran
from shoal.wire.generation import Generated


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
        self._fill = Histogram(
            "shoal_worker_batch_fill",
            "Useful share of the tokens that a batch computed.",
            buckets=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0),
            registry=r,
        )
        self._wait_s = Histogram(
            "shoal_worker_wait_seconds",
            "From submission to the start of the item's batch.",
            buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
            registry=r,
        )
        self.texts = Gauge(
            "shoal_worker_growing_texts", "Texts that are being generated.", ["model"], registry=r
        )
        self._generated = Counter(
            "shoal_worker_generated_tokens", "Tokens generated.", ["model"], registry=r
        )
        self.window = Gauge(
            "shoal_worker_window_items",
            "Items that wait for a batch.",
            ["model", "lane"],
            registry=r,
        )
        self.urgent = Gauge(
            "shoal_worker_urgent_batches", "Batches that a deadline put first, so far.", registry=r
        )
        self.debt_s = Gauge(
            "shoal_worker_debt_seconds",
            "Device time that the last urgent batch was ahead of its share.",
            registry=r,
        )
        self.held = Gauge("shoal_worker_held_items", "Items in hand.", registry=r)
        self.residents = Gauge("shoal_worker_resident_models", "Loaded copies.", registry=r)
        self.loads = Counter("shoal_worker_loads", "Loads that ended well.", registry=r)
        self.load_s = Counter("shoal_worker_load_seconds", "What they took.", registry=r)
        self.evictions = Counter("shoal_worker_evictions", "Copies that went.", registry=r)
        self._count_memory(r)

    def _count_memory(self, registry: CollectorRegistry) -> None:
        self.memory_used = Gauge(
            "shoal_worker_memory_used_bytes",
            "What the runtime processes hold, loads under way included.",
            ["memory"],
            registry=registry,
        )
        self.memory_budget = Gauge(
            "shoal_worker_memory_budget_bytes",
            "What models may use at the moment.",
            ["memory"],
            registry=registry,
        )

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
        if ran.padded_tokens:
            self._fill.observe(min(1.0, batch.tokens / ran.padded_tokens))

    def on_text(self, model: str, generated: Generated, took_s: float) -> None:
        """A text is whole."""
        self._items.labels(model).inc()
        self._tokens.labels(model).inc(generated.prompt_tokens + generated.tokens)
        self._generated.labels(model).inc(generated.tokens)
        self._run_s.labels(model).inc(took_s)

    def on_wait(self, waited_s: float) -> None:
        """An item's batch starts."""
        self._wait_s.observe(waited_s)

    def serve(self, port: int) -> None:
        """Serves /metrics on loopback from a thread of its own."""
        start_http_server(port, addr="127.0.0.1", registry=self.registry)
