"""Counts of the HTTP edge for `/metrics`.

Owns what is counted and its names. Counting is a few additions in plain dictionaries, because it
happens for every request; prometheus_client only sees them when somebody scrapes. Does not own
metrics of the queue or the workers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from shoal.gateway.generation import usage_of
from shoal.gateway.jobs import Job
from shoal.gateway.timing import Speed
from shoal.wire.generation import Generated

BUCKETS_S: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)


class _Times:
    """How often a time was within each bucket."""

    __slots__ = ("buckets", "sum_s")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def add(self, took_s: float) -> None:
        """Counts a time."""
        self.buckets[bisect_left(BUCKETS_S, took_s)] += 1
        self.sum_s += took_s

    def cumulative(self) -> list[tuple[str, float]]:
        """As prometheus_client takes it: each bucket with those before it."""
        running = [float(n) for n in accumulate(self.buckets)]
        return list(zip([*map(str, BUCKETS_S), "+Inf"], running, strict=True))


class _Texts:
    """What one model generated for one route."""

    __slots__ = ("first", "further", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.first = _Times()
        self.further = _Times()


class _Route:
    """Counts of one route."""

    __slots__ = ("in_bytes", "inputs", "out_bytes", "statuses", "times", "tokens")

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        self.times = _Times()
        self.in_bytes = 0
        self.out_bytes = 0
        self.tokens = 0
        self.inputs = 0


class Traffic(Collector):
    """Counts by route; `n_open` is set by the app before a scrape."""

    def __init__(self) -> None:
        self._routes: dict[str, _Route] = {}
        self._texts: dict[tuple[str, str], _Texts] = {}
        self._refusals: dict[str, int] = {}
        self.n_open = 0

    def add(self, route: str, status: int, took_s: float, in_bytes: int, out_bytes: int) -> None:
        """Counts one answered request."""
        counts = self._route(route)
        counts.statuses[status] = counts.statuses.get(status, 0) + 1
        counts.times.add(took_s)
        counts.in_bytes += in_bytes
        counts.out_bytes += out_bytes

    def add_work(self, route: str, inputs: int, tokens: int) -> None:
        """Counts the inputs and tokens of one answered job."""
        counts = self._route(route)
        counts.inputs += inputs
        counts.tokens += tokens

    def add_texts(self, route: str, job: Job, texts: Sequence[Generated], speed: Speed) -> int:
        """Counts the texts of one answered job; returns the tokens that were read for them."""
        # A job has its model from the catalog, so that callers cannot make names.
        counts = self._texts.setdefault((route, job.entry.id), _Texts())
        usage = usage_of(job, texts)
        counts.tokens += usage.completion_tokens
        counts.first.add(speed.first_token_s)
        if speed.token_s > 0:
            counts.further.add(speed.token_s)
        return usage.prompt_tokens

    def add_refusal(self, reason: str) -> None:
        """Counts a request that was refused for want of capacity; reason: the error's code."""
        self._refusals[reason] = self._refusals.get(reason, 0) + 1

    def _route(self, route: str) -> _Route:
        counts = self._routes.get(route)
        if counts is None:
            counts = self._routes[route] = _Route()
        return counts

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client asks for on each scrape."""
        requests = CounterMetricFamily(
            "shoal_gateway_requests", "Requests answered.", labels=["route", "status"]
        )
        sizes = CounterMetricFamily(
            "shoal_gateway_bytes", "Bytes of bodies.", labels=["route", "direction"]
        )
        inputs = CounterMetricFamily(
            "shoal_gateway_inputs", "Inputs that were answered.", labels=["route"]
        )
        tokens = CounterMetricFamily(
            "shoal_gateway_tokens", "Tokens that models read for answers.", labels=["route"]
        )
        times = HistogramMetricFamily(
            "shoal_gateway_request_seconds",
            "Time from a request's headers to its answer.",
            labels=["route"],
        )
        for name, counts in sorted(self._routes.items()):
            for status, n in sorted(counts.statuses.items()):
                requests.add_metric([name, str(status)], n)
            sizes.add_metric([name, "in"], counts.in_bytes)
            sizes.add_metric([name, "out"], counts.out_bytes)
            inputs.add_metric([name], counts.inputs)
            tokens.add_metric([name], counts.tokens)
            times.add_metric([name], counts.times.cumulative(), counts.times.sum_s)
        open_now = GaugeMetricFamily(
            "shoal_gateway_open_requests", "Requests that are being answered.", value=self.n_open
        )
        refusals = CounterMetricFamily(
            "shoal_gateway_refusals",
            "Requests refused for want of capacity, by the code of the error.",
            labels=["reason"],
        )
        for reason, n in sorted(self._refusals.items()):
            refusals.add_metric([reason], n)
        yield from (requests, sizes, inputs, tokens, times, open_now, refusals)
        yield from self._of_texts()

    def _of_texts(self) -> Iterator[Metric]:
        labels = ["route", "model"]
        tokens = CounterMetricFamily(
            "shoal_gateway_generated_tokens", "Tokens that models generated.", labels=labels
        )
        first = HistogramMetricFamily(
            "shoal_gateway_first_token_seconds",
            "Time from a request to the first token of its texts.",
            labels=labels,
        )
        further = HistogramMetricFamily(
            "shoal_gateway_token_seconds",
            "Mean time of each further token of an answer.",
            labels=labels,
        )
        for names, counts in sorted(self._texts.items()):
            tokens.add_metric(names, counts.tokens)
            first.add_metric(names, counts.first.cumulative(), counts.first.sum_s)
            further.add_metric(names, counts.further.cumulative(), counts.further.sum_s)
        yield from (tokens, first, further)
