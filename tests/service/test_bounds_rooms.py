"""Every bound inside the processes, reached: what happens there is what docs/limits.md says."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading

import httpx
import psutil
import pytest

from shoal.catalog.schema import Entry, Output
from shoal.catalog.snapshot import Snapshot
from shoal.clock import wall
from shoal.core.lanes import DEFAULT_LANES, MAX_LANES, parse_lanes
from shoal.errors import CapacityError, QueueFull, RuntimeCrashed, SettingsError
from shoal.gateway import submit
from shoal.gateway.backlog import MAX_GATEWAYS, BacklogBook
from shoal.gateway.fleet import MAX_WORKERS, Fleet
from shoal.gateway.idempotency import MAX_WAITING, Idempotency, once
from shoal.gateway.jobs import Job
from shoal.gateway.submit import Submitter
from shoal.ipc.client import MAX_CALLS, RuntimeConnection
from shoal.ipc.messages import Unload, encode
from shoal.ipc.server import MAX_WAITING_CALLS
from shoal.queue.interface import QueueLimits
from shoal.queue.memory import MemoryBroker, MemoryQueue
from shoal.runtimes.onnx.cache import MAX_GRAPHS, cached
from shoal.settings import GatewaySettings
from shoal.wire import envelope as wire
from shoal.wire.frames import FrameDecoder, frame
from shoal.worker.costs import MAX_KEPT, CostBook
from shoal.worker.held import Held
from shoal.worker.intake import MAX_CANCELLED, Intake
from shoal.worker.sent import MAX_REQUESTS, SentOutcomes
from shoal.worker.supervise import RuntimeProcess
from tests.conftest import run
from tests.support.gateway_server import gateway_server
from tests.support.pace import limit_s
from tests.support.raw_http import connect, post, until

ENTRY = Entry(id="m", tasks=["encode"], source="file:///x", outputs={"dense": Output(1)})
ENCODE = {"model": "dense", "inputs": ["a"]}


@pytest.mark.parametrize("size", [50_000, 150_000], ids=["in one piece", "in pieces"])
def test_bounds_bodies_in_hand(size):
    """Bodies over `max_open_bytes` together are 429; those that are open go on, and leave room."""
    large = {"model": "dense", "inputs": ["hold", *["x" * 1000] * (size // 1000)]}
    fits = {"model": "dense", "inputs": ["x" * 1000] * (size // 1000)}
    with gateway_server(max_open_bytes=size * 3 // 2) as served:
        with connect(served.port) as peer:
            peer.sendall(post(large))
            until(lambda: served.submits.jobs)
            answer = httpx.post(f"{served.url}/v1/encode", json=fits)
            assert (answer.status_code, answer.json()["code"]) == (429, "queue_full")
            assert answer.headers["retry-after"] == "1"
            assert httpx.post(f"{served.url}/v1/encode", json=ENCODE).status_code == 200
        until(lambda: served.submits.cancelled)
        for _ in range(3):
            assert httpx.post(f"{served.url}/v1/encode", json=fits).status_code == 200


class Submits:
    """A submit path on a queue in memory that no worker serves."""

    def __init__(self, **settings):
        self.queue = MemoryQueue(MemoryBroker(QueueLimits()))
        fleet, lanes = Fleet(), parse_lanes(DEFAULT_LANES)
        book = BacklogBook(fleet, lambda: Snapshot([ENTRY]), lanes, name="g")
        self.submitter = Submitter(self.queue, fleet, book, GatewaySettings(**settings))

    def run(self, n_inputs, deadline_s=60.0):
        inputs = wire.Inputs(["text"] * n_inputs)
        ends_s = wall() + deadline_s
        job = Job("r", "encode", ENTRY, inputs, wire.Params(["dense"]), "interactive", ends_s)
        return asyncio.ensure_future(self.submitter.run(job))


def test_bounds_items_in_flight():
    """A job that would make more items wait than may is refused whole; room comes back."""

    async def main():
        place = Submits(max_in_flight_items=4, item_inputs=1)
        first = place.run(3)
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as refused:
            await place.run(2)
        assert refused.value.retry_after_s > 0
        assert place.submitter.in_flight == 3
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert place.submitter.in_flight == 0
        again = place.run(4)
        await asyncio.sleep(0)
        assert place.submitter.in_flight == 4
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)

    run(main())


def test_bounds_large_results_in_flight():
    """One large result too many at the same time fails its own request with a 429."""

    async def main():
        place = Submits()
        jobs = [place.run(1) for _ in range(submit._MAX_FETCHES + 1)]
        while place.submitter.in_flight < len(jobs):
            await asyncio.sleep(0)
        for item in list(place.submitter._waiting):
            ref = wire.PayloadRef("k", 1, "0")
            place.submitter.on_outcome(wire.encode(wire.Outcome(item, payload=ref)))
        assert len(place.submitter._fetches) == submit._MAX_FETCHES
        ended = await asyncio.gather(*jobs, return_exceptions=True)
        assert sum(isinstance(each, QueueFull) for each in ended) == 1

    run(main())


def test_bounds_workers_known():
    """Of more workers than are kept, the one that was silent longest is forgotten."""
    fleet = Fleet(clock=lambda: 0.0)
    for n in range(MAX_WORKERS + 1):
        fleet.on_status(wire.encode(wire.Status(f"w{n}", [])))
    assert fleet.size == MAX_WORKERS
    assert "w0" not in fleet._workers
    assert f"w{MAX_WORKERS}" in fleet._workers


def test_bounds_gateways_known():
    """Of more gateways than are kept, the oldest word is forgotten, and its tokens with it."""
    lanes = parse_lanes(DEFAULT_LANES)
    book = BacklogBook(Fleet(), lambda: Snapshot([ENTRY]), lanes, name="g")
    for n in range(MAX_GATEWAYS + 5):
        book.on_backlog(wire.encode(wire.Backlog(f"g{n}", {"interactive": {"m": 1, "bad": -7}})))
    assert book._all == {("interactive", "m"): MAX_GATEWAYS}


def test_bounds_cancelled_requests_remembered(tmp_path):
    """Of more cancels than are remembered, the oldest are forgotten."""
    queue = MemoryQueue(MemoryBroker(QueueLimits()))
    held = Held(queue, worker="w", ack_wait_s=1.0, max_attempts=1, inline_max=1)
    intake = Intake(
        queue,
        held,
        None,
        None,
        roster=None,
        cache_dir=tmp_path,
        on_traits=None,
    )
    for n in range(MAX_CANCELLED + 3):
        intake.on_cancel(wire.encode(wire.Cancel(f"r{n}")))
    assert len(intake._cancelled) == MAX_CANCELLED
    assert next(iter(intake._cancelled)) == "r3"


def test_bounds_questions_for_lost_outcomes():
    """More gateways than may ask at once for lost outcomes are passed over, not queued up."""

    async def main():
        broker = MemoryBroker(QueueLimits())
        worker, gateway = MemoryQueue(broker), MemoryQueue(broker)
        got = []
        await gateway.listen(got.append)
        sent = SentOutcomes(worker)
        sent.add("a", wire.encode(wire.Outcome("a")))
        for _ in range(MAX_REQUESTS + 50):
            sent.on_missing(wire.encode(wire.Missing(gateway.inbox, ["a"])))
        assert len(sent._tasks) == MAX_REQUESTS
        while sent._tasks:
            await asyncio.sleep(0)
        assert len(got) == MAX_REQUESTS

    run(main())


def test_bounds_threads_of_a_runtime(monkeypatch):
    """Linear algebra gets as many as the worker gives, whatever its own environment says."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")

    async def claim() -> None:
        process = RuntimeProcess("null", device="cpu#0", threads=1, on_lost=lambda: None)
        try:
            await process.connection()
            environ = psutil.Process(process.pid).environ()
            assert {environ["OMP_NUM_THREADS"], environ["OPENBLAS_NUM_THREADS"]} == {"1"}
        finally:
            await process.stop()

    run(claim())


def test_bounds_calls_to_a_runtime():
    """A call more than may be open is refused; when the process goes, every open one fails."""

    async def main():
        ours, theirs = socket.socketpair()
        connection = await RuntimeConnection.open(ours)
        calls = [asyncio.ensure_future(connection.memory()) for _ in range(MAX_CALLS)]
        await asyncio.sleep(0)
        with pytest.raises(CapacityError):
            await connection.memory()
        theirs.close()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(each, RuntimeCrashed) for each in ended)

    run(main())


SERVER = """
import socket, sys, time
from shoal.ipc.messages import Hello, Memory, Traits
from shoal.ipc.server import RuntimeServer

def handle(call):
    if call.seq == 1:
        while not server._calls.full():
            time.sleep(0.01)
        time.sleep(0.1)  # what is still sent finds no room
        print(server._calls.qsize(), flush=True)
    return Memory(call.seq, 0)

server = RuntimeServer(socket.socket(fileno=int(sys.argv[1])), handle, handle)
server.serve(Hello("r", "1", 1, Traits(True, ["encode"])))
"""


def test_bounds_calls_that_wait_in_a_runtime():
    """A runtime that is behind stops reading; no call is lost, and all are answered in order."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", SERVER, str(theirs.fileno())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[theirs.fileno()]) as child:
        theirs.close()
        count = MAX_WAITING_CALLS + 500
        calls = b"".join(frame(encode(Unload(n, "k" * 200))) for n in range(1, count + 1))
        sender = threading.Thread(target=ours.sendall, args=(calls,))
        sender.start()
        decoder, answers = FrameDecoder(), []
        answers += decoder.feed(ours.recv(65536))  # hello
        assert int(child.stdout.readline()) == MAX_WAITING_CALLS
        while len(answers) < count + 1:
            answers += decoder.feed(ours.recv(65536))
        sender.join()
        ours.close()
        assert child.wait(limit_s(10)) == 0


def test_bounds_graphs_on_disk(tmp_path):
    """Of more derived graphs than are kept, the one that was used longest ago goes."""
    for n in range(MAX_GRAPHS):
        cached(tmp_path, "encoder", str(n), lambda n=n: b"graph %d" % n)
    paths = sorted(tmp_path.iterdir())
    for path in paths:
        os.utime(path, (1, 1))
    assert cached(tmp_path, "encoder", "0", lambda: b"built again") == b"graph 0"
    cached(tmp_path, "encoder", "new", lambda: b"new")
    left = set(tmp_path.iterdir())
    assert len(left) == MAX_GRAPHS
    assert cached(tmp_path, "encoder", "0", lambda: b"built again") == b"graph 0"
    assert cached(tmp_path, "encoder", "new", lambda: b"built again") == b"new"
    assert len(set(paths) - left) == 1


def test_bounds_costs_on_disk(tmp_path):
    """Of more learnt costs than are kept, the oldest go; what is in use stays."""
    file = tmp_path / "costs.json"
    state = {"launch_s": 0.1, "token_s": 0.1}
    key = f"{ENTRY.key} {ENTRY.runtime} cpux1"
    kept = {key: state} | {f"m{n}@1 onnx cpux1": state for n in range(MAX_KEPT)}
    file.write_text(json.dumps(kept))
    book = CostBook(file, "cpux1")
    book.model(ENTRY)
    book.save()
    found = list(json.loads(file.read_text()))
    assert len(found) == MAX_KEPT
    assert found[-1] == key
    assert found[0] == "m1@1 onnx cpux1"


def test_bounds_requests_that_wait_for_another():
    """More requests with a key than may wait for the first with it are refused, not queued up."""

    async def main():
        broker = MemoryBroker(QueueLimits())
        keys = Idempotency(MemoryQueue(broker), ttl_s=60, inline_max_bytes=1000)

        def ask():
            asked = once(b"key", None, "/v1/encode", b"body", wall() + 30)
            return asyncio.ensure_future(keys.answer(asked, asyncio.Event().wait))

        waiting = [ask() for _ in range(1 + MAX_WAITING)]
        while keys._n_waiting < MAX_WAITING:
            await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await ask()
        for task in waiting[1:]:
            task.cancel()
        await asyncio.gather(*waiting[1:], return_exceptions=True)
        assert keys._n_waiting == 0
        waiting[0].cancel()
        await asyncio.gather(waiting[0], *keys._tasks, return_exceptions=True)

    run(main())


def test_bounds_lanes():
    """As many lanes as may be are taken; one more is an error of the settings."""
    lanes = [f"lane{n}:1:100ms:1s" for n in range(MAX_LANES + 1)]
    assert len(parse_lanes(",".join(lanes[:-1]))) == MAX_LANES
    with pytest.raises(SettingsError):
        parse_lanes(",".join(lanes))
