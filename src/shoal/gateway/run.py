"""The gateway process: an HTTP server on a queue, from start to drain.

Owns the order of start and stop. Does not own the listening socket (`listening`), routes (`app`) or
jobs (`submit`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Iterable
from functools import partial

import uvloop
from prometheus_client import CollectorRegistry, Gauge

from shoal.catalog.follow import Following
from shoal.catalog.seed import join
from shoal.core.lanes import LaneRule, parse_lanes
from shoal.gateway.app import App
from shoal.gateway.backlog import BacklogBook
from shoal.gateway.edge import EdgeLimits
from shoal.gateway.fleet import Fleet
from shoal.gateway.idempotency import Idempotency
from shoal.gateway.listening import listen, url_of, write_endpoint
from shoal.gateway.recall import Recall
from shoal.gateway.server import Server
from shoal.gateway.submit import Submitter
from shoal.queue.interface import Queue
from shoal.queue.opening import open_queue
from shoal.settings import GatewaySettings

log = logging.getLogger(__name__)


async def serve(settings: GatewaySettings, listener: socket.socket, queue: Queue) -> None:
    """Serves until SIGTERM or SIGINT, then finishes what is open and leaves."""
    following = Following(queue.catalog)
    await following.start()
    queue.when_back(following.restore)
    fleet = Fleet()
    lanes = parse_lanes(settings.lanes)
    backlog = BacklogBook(
        fleet, lambda: following.snapshot, lanes, name=queue.inbox, admission=settings.admission
    )
    submitter = Submitter(queue, fleet, backlog, settings)
    await queue.hear("status", fleet.on_status)
    await queue.hear("backlog", backlog.on_backlog)
    await queue.listen(submitter.on_outcome)
    recall = Recall(queue, submitter.waiting_items)
    await queue.hear("back", recall.on_back)
    queue.when_back(recall.ask_soon)
    registry = _registry(submitter, fleet, backlog, lanes)
    idempotency = Idempotency(
        queue, ttl_s=settings.idempotency_ttl_s, inline_max_bytes=settings.inline_max_bytes
    )
    app = App(settings, lambda: following.snapshot, submitter, registry, idempotency)
    url = url_of(listener)

    def on_started() -> None:
        if settings.endpoint_file:
            write_endpoint(settings.endpoint_file, url)
        log.info("gateway listens on %s", url)

    server = Server(
        app,
        shutdown_s=settings.shutdown_s,
        on_started=on_started,
        limits=EdgeLimits.of(settings),
    )
    loop = asyncio.get_running_loop()

    def leave() -> None:
        app.draining = True
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave)
    telling = asyncio.create_task(backlog.run(queue), name="backlog")
    try:
        await server.serve([listener])
    finally:
        telling.cancel()


def _registry(
    submitter: Submitter, fleet: Fleet, backlog: BacklogBook, lanes: Iterable[LaneRule]
) -> CollectorRegistry:
    registry = CollectorRegistry()
    waiting = Gauge(
        "shoal_gateway_waiting_items", "Items in the queue or in work.", registry=registry
    )
    waiting.set_function(lambda: submitter.in_flight)
    workers = Gauge("shoal_gateway_live_workers", "Workers heard of lately.", registry=registry)
    workers.set_function(lambda: fleet.size)
    devices = Gauge("shoal_gateway_live_devices", "Devices of live workers.", registry=registry)
    devices.set_function(lambda: fleet.devices)
    seconds = Gauge(
        "shoal_gateway_backlog_seconds",
        "Estimated device seconds of what waits, that of other gateways included.",
        ["lane"],
        registry=registry,
    )
    bound = Gauge(
        "shoal_gateway_wait_bound_seconds",
        "The longest that admission expects new work of the lane to wait.",
        ["lane"],
        registry=registry,
    )
    for lane in (rule.name for rule in lanes):
        seconds.labels(lane).set_function(partial(backlog.backlog_s, lane))
        bound.labels(lane).set_function(partial(backlog.wait_bound_s, lane))
    return registry


async def _run(settings: GatewaySettings) -> None:
    with listen(settings) as listener:
        queue = await open_queue(settings, name="shoal gateway")
        try:
            await join(queue.catalog, settings.catalog)
            await serve(settings, listener, queue)
        finally:
            await queue.close()


def run(settings: GatewaySettings) -> None:
    """Runs a gateway until SIGTERM or SIGINT."""
    uvloop.run(_run(settings))
