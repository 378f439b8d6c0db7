"""Memory, files and threads stay as they are, however many requests and loads there have been.

The many requests are part of `make check-all`. `make soak` runs the same for longer: SOAK_REQUESTS
and SOAK_LOADS say how many.
"""

from __future__ import annotations

import os
import subprocess
import sys

import httpx
import msgspec
import numpy as np
import psutil
import pytest

from shoal.worker.sent import MAX_OUTCOMES
from tests.support.raw_http import until
from tests.support.raw_load import drive
from tests.support.runtime_models import MINILM, package_path
from tests.support.shoal_process import Serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "32000"))
LOADS = int(os.environ.get("SOAK_LOADS", "16"))
STEP = 1_000
# A worker keeps its last answers for gateways that miss them: so many, then no more.
WARM_REQUESTS = MAX_OUTCOMES + 4_000
WARM_LOADS = 10
MIB = 2**20
PARTS = {
    "gateway": "module shoal gateway",
    "worker": "module shoal worker",
    "runtime": "shoal.runtimes.host",
    "broker": "nats.conf",
}


def request(n: int) -> tuple[bytes, int]:
    """A request of its own kind: names that callers choose must not pile up anywhere."""
    body, status, lines = {"model": "echo", "inputs": [f"text {n}"]}, 200, ""
    if n % 20 == 1:
        body, status = {"model": f"no-model-{n}", "inputs": ["a"]}, 404
    elif n % 20 == 2:
        body, status = {"model": "echo", f"field-{n}": 1}, 400
    elif n % 20 == 3:
        lines = f"x-shoal-tenant: tenant-{n}\r\n"
    elif n % 20 == 4:
        lines = f"x-request-id: request-{n}\r\naccept: application/json;x={n}\r\n"
    elif n % 20 == 5:
        lines = "x-shoal-lane: bulk\r\n"
    data = msgspec.msgpack.encode(body)
    head = (
        "POST /v1/encode HTTP/1.1\r\nhost: x\r\ncontent-type: application/msgpack\r\n"
        f"{lines}content-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data, status


def growth(samples: list[int]) -> float:
    """What a straight line through the samples gains from the first to the last."""
    slope = np.polyfit(np.arange(len(samples)), np.array(samples, float), 1)[0]
    return float(slope) * (len(samples) - 1)


def files_of(process: psutil.Process) -> int:
    """Open files and threads, once the connections of the last callers are closed."""
    until(lambda: process.num_fds() < 40)
    return process.num_fds() + process.num_threads()


@pytest.mark.long
def test_bounds_memory_is_flat_over_many_requests(tmp_path):
    """Resident memory of every process but the broker is flat; files and threads are as before."""
    server = Serve(tmp_path, "--devices", "cpu:1", models={"echo": "{}"})
    port = int(server.url.rpartition(":")[2])
    drive(port, request, range(WARM_REQUESTS))
    parts = {name: server.children(mark)[0] for name, mark in PARTS.items()}
    resident: dict[str, list[int]] = {name: [] for name in parts}
    before = {name: files_of(process) for name, process in parts.items()}
    for first in range(WARM_REQUESTS, REQUESTS, STEP):
        drive(port, request, range(first, first + STEP))
        for name, process in parts.items():
            resident[name].append(process.memory_info().rss)
    for name, process in parts.items():
        until(lambda name=name, process=process: files_of(process) <= before[name] + 1)
    metrics = httpx.get(f"{server.url}/metrics").text
    until(lambda: "shoal_gateway_waiting_items 0.0" in httpx.get(f"{server.url}/metrics").text)
    assert "shoal_gateway_open_requests 1.0" in metrics
    assert server.leave() == 0, server.output
    for name in ("gateway", "worker", "runtime"):
        samples = resident[name]
        report = f"{name}: {[round(each / MIB, 1) for each in samples]}"
        assert growth(samples) < max(2 * MIB, 0.02 * samples[0]), report
    assert growth(resident["broker"]) < 32 * MIB, resident["broker"]  # Go collects late


def in_a_process(program):
    """The rows of numbers that a program printed."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("runtime", "keep"), [("onnx", False), ("onnx", True), ("torch", False)])
def test_bounds_memory_is_flat_over_many_loads(tmp_path, runtime, keep):
    """Loads and unloads of a real model leave no more memory, files or threads each time.

    What is kept for the next load is no memory of the process.
    """
    program = f"""
import psutil
import numpy as np
from shoal.ipc.messages import Load, ModelSpec, Run, RunItem, Unload
from shoal.runtimes.host import Host
from shoal.runtimes.registry import create

host, me = Host(create({runtime!r}, "cpu", 1)), psutil.Process()
spec = ModelSpec("m", {str(package_path(MINILM))!r}, {str(tmp_path)!r}, ["encode"])
rng = np.random.default_rng(0)
for cycle in range({LOADS}):
    assert host.handle(Load(1, spec)).warm == ({keep} and cycle > 0)
    lengths = rng.integers(3, 50, 4).tolist()
    ids = rng.integers(1000, 29000, sum(lengths)).astype("<u2").tobytes()
    ran = host.handle(Run(2, "m", [RunItem("i", "encode", lengths, ids=ids)]))
    assert ran.items[0].failure is None, ran
    loaded = me.memory_info().rss
    host.handle(Unload(3, "m", keep={keep}))
    print(loaded, me.memory_info().rss, me.num_fds() + me.num_threads())
"""
    rows = [[int(part) for part in row] for row in in_a_process(program)]
    loaded, left, files = (list(column) for column in zip(*rows, strict=True))
    warm = min(WARM_LOADS, len(left) // 3)
    report = [
        (round(one / MIB, 1), round(other / MIB, 1))
        for one, other in zip(loaded, left, strict=True)
    ]
    assert growth(left[warm:]) < 8 * MIB, report
    assert growth(loaded[warm:]) < 8 * MIB, report
    assert max(files[warm:]) <= max(files[:warm]) + 1, files
    assert loaded[-1] - left[-1] > 30 * MIB, report  # a loaded model can be told from none


@pytest.mark.parametrize("runtime", ["onnx", "torch"])
def test_bounds_memory_of_a_load_that_does_not_fit_is_given_back(tmp_path, runtime):
    """With ever more room for it, a load fails as out of memory, leaving nothing, until it fits."""
    program = f"""
import resource

import psutil
from shoal.ipc.messages import Failed, Load, ModelSpec, Unload
from shoal.runtimes.host import Host
from shoal.runtimes.registry import create

host, me = Host(create({runtime!r}, "cpu", 1)), psutil.Process()
spec = ModelSpec("m", {str(package_path(MINILM))!r}, {str(tmp_path)!r}, ["encode"])
host.handle(Load(1, spec))  # brings the libraries
host.handle(Unload(2, "m"))
room_bytes, answer = 0, None
while answer is None or isinstance(answer, Failed):
    room_bytes += 15 * 2**20
    before = me.memory_info()
    resource.setrlimit(resource.RLIMIT_AS, (before.vms + room_bytes, resource.RLIM_INFINITY))
    answer = host.handle(Load(3, spec))
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if isinstance(answer, Failed):
        assert host.memory(4).models == {{}}
        print(answer.failure.code, me.memory_info().rss - before.rss)
"""
    rows = in_a_process(program)
    assert {code for code, _ in rows} == {"out_of_memory"}
    assert max(int(left_bytes) for _, left_bytes in rows) < 8 * MIB, rows
