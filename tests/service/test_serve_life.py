"""The life of the processes: start, ready line, crashes, drain, and dying with the parent."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import threading
import time

import httpx
import psutil
import pytest

from tests.conftest import NatsServer
from tests.support.metrics import metric
from tests.support.pace import limit_s
from tests.support.ports import free_port
from tests.support.raw_http import until
from tests.support.shoal_process import NULL_ENTRY, Serve, ShoalProcess

# On a slow machine a worker that lives does not lose its items, nor a runtime its life.
FAST = ("--devices", "cpu:1", "--ack-wait-s", f"{limit_s(1.0):.1f}")
RUN_TIMEOUT_S = limit_s(3.0)
MODELS = {"echo": "{}", "slow": f"{{sleep_s: {limit_s(1.0):.1f}}}"}


def encode(url, text="x", model="echo", timeout_s=60.0):
    body = {"model": model, "inputs": text}
    headers = {"X-Shoal-Deadline-Ms": f"{limit_s(timeout_s) * 1e3:.0f}"}
    return httpx.post(
        f"{url}/v1/encode", json=body, headers=headers, timeout=limit_s(timeout_s + 5)
    )


def written(serve):
    """What the server has written down of where it listens."""
    return json.loads((serve.folder / "data" / "endpoint.json").read_text())


def served_again(serve):
    """Waits until a request is answered; the address of the gateway that did."""
    give_up = time.monotonic() + limit_s(60)
    while True:
        try:
            url = written(serve)["url"]
            if encode(url, timeout_s=10).status_code == 200:
                return url
        except (httpx.HTTPError, OSError, ValueError):
            time.sleep(0.05)
        assert time.monotonic() < give_up, serve.output


def started(folder, *flags):
    """A server with a model that answers at once and a slow one; `worker_url` has its metrics."""
    port = free_port()
    flags = (*FAST, "--metrics-port", str(port), *flags)
    server = Serve(folder, *flags, models=MODELS)
    server.worker_url = f"http://127.0.0.1:{port}"
    return server


class Callers:
    """Requests to the slow model, each in a thread; once one runs, the rest of the block does."""

    def __init__(self, serve, url, n=1):
        self.answers = []
        self._serve = serve
        self._threads = [
            threading.Thread(target=lambda: self.answers.append(encode(url, model="slow")))
            for _ in range(n)
        ]

    def __enter__(self):
        before = self._sent()
        for thread in self._threads:
            thread.start()
        until(lambda: self._sent() > before, timeout_s=30)
        return self

    def __exit__(self, *_):
        for thread in self._threads:
            thread.join()

    def _sent(self):
        """How many items the worker has sent to its runtime."""
        return metric(self._serve.worker_url, "shoal_worker_wait_seconds_count")


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """One server, whose parts tests break: each begins once all are served again."""
    flags = ("--run-timeout-s", f"{RUN_TIMEOUT_S:.1f}")
    server = started(tmp_path_factory.mktemp("life"), *flags)
    yield server
    assert server.leave() == 0, server.output


def test_serve_life_ctrl_c_finishes_what_is_open(tmp_path):
    """The port that it chose is printed and written; what runs when Ctrl-C comes is answered.

    Then everything leaves, long before the time that open requests and held items may take.
    """
    serve = started(tmp_path, "--shutdown-s", "600", "--drain-s", "600")
    assert written(serve)["url"] == serve.url
    assert httpx.get(f"{serve.url}/readyz").status_code == 200
    encode(serve.url, model="slow")
    with Callers(serve, serve.url) as callers:
        family = psutil.Process(serve.process.pid).children(recursive=True)
        begun = time.monotonic()
        assert serve.leave(timeout_s=60) == 0, serve.output
        assert time.monotonic() - begun < limit_s(15)
    assert not (serve.folder / "data" / "endpoint.json").exists()
    assert callers.answers[0].status_code == 200
    _, alive = psutil.wait_procs(family, timeout=limit_s(2))
    assert alive == []


def test_serve_life_children_die_when_the_parent_is_killed(tmp_path):
    """SIGKILL of `shoal serve` leaves no broker, gateway, worker or runtime behind."""
    serve = started(tmp_path)
    encode(serve.url)
    family = psutil.Process(serve.process.pid).children(recursive=True)
    assert len(family) >= 4
    serve.leave(signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=limit_s(10))
    assert alive == []


def test_serve_life_runtime_is_started_again_after_a_crash(serve):
    """A killed runtime process costs no request: its items run again in a new one."""
    url = served_again(serve)
    encode(url, model="slow")
    with Callers(serve, url) as callers:
        for process in serve.children("shoal.runtimes.host"):
            process.kill()
    assert callers.answers[0].status_code == 200, callers.answers[0].text


def test_serve_life_runtime_that_hangs_is_started_again(serve):
    """A runtime that stands still is ended after the time it may take; its items run again."""
    url = served_again(serve)
    before = len(serve.lines)
    for process in serve.children("shoal.runtimes.host"):
        process.suspend()
    answer = encode(url, "after the hang")
    assert answer.status_code == 200, answer.text
    until(lambda: any("hangs" in line for line in serve.lines[before:]))


@pytest.mark.parametrize("part", ["shoal worker", "shoal gateway", "nats.conf"])
def test_serve_life_parts_are_started_again_after_a_crash(serve, part):
    """After the worker, the gateway or the broker is killed, requests are served again."""
    served_again(serve)
    killed = serve.children(part)
    assert killed
    for process in killed:
        process.kill()
    psutil.wait_procs(killed, timeout=limit_s(5))
    served_again(serve)


def test_serve_life_worker_crash_loses_no_item(serve):
    """What a killed worker held is answered by its successor."""
    url = served_again(serve)
    encode(url, model="slow")
    with Callers(serve, url, 3) as callers:
        for process in serve.children("shoal worker"):
            process.kill()
    answers = callers.answers
    assert [a.status_code for a in answers] == [200, 200, 200], [a.text for a in answers]


def test_serve_life_refuses_a_taken_port_and_a_taken_folder(serve):
    """A second start says what is in its way, in one line, with exit status 2."""
    port = served_again(serve).rpartition(":")[2]
    other = ShoalProcess("serve", "--port", port, "--data-dir", str(serve.folder / "other"))
    assert other.ended(20) == 2
    assert "port" in other.output
    assert "Traceback" not in other.output
    same = ShoalProcess("serve", "--port", "0", "--data-dir", str(serve.folder / "data"))
    assert same.ended(20) == 2
    assert "--data-dir" in same.output


def test_serve_life_refuses_a_public_address_without_keys():
    """Nobody exposes an open API by accident."""
    public = ShoalProcess("serve", "--host", "0.0.0.0", "--port", "0")  # noqa: S104
    assert public.ended(20) == 2
    assert "--insecure" in public.output


def test_serve_life_ready_line_has_requests_that_answer(tmp_path):
    """The printed commands, copied into a shell, are answered by real models."""
    server = Serve(tmp_path)
    try:
        server.wait_for("open http")
        commands = [line.strip() for line in server.lines if line.strip().startswith("curl")]
        assert len(commands) == 3
        for command in commands:
            arguments = [*shlex.split(command), "--fail-with-body", "--max-time", "60"]
            done = subprocess.run(arguments, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout
            assert json.loads(done.stdout)["model"]
    finally:
        server.leave()


def test_serve_life_parts_run_alone_against_a_broker(tmp_path):
    """`shoal gateway` and `shoal worker` work against a NATS server that someone else runs."""
    nats_server = NatsServer(tmp_path / "nats")
    catalog = tmp_path / "catalog"
    catalog.mkdir()
    (catalog / "echo.yaml").write_text(NULL_ENTRY.format(id="echo", options="{}") + "pool: alone\n")
    shared = ("--nats-url", nats_server.address.url, "--catalog", str(catalog), "--pool", "alone")
    token = {"SHOAL_NATS_TOKEN": nats_server.address.token}
    endpoint = tmp_path / "endpoint.json"
    gateway = ShoalProcess(
        "gateway", *shared, "--port", "0", "--endpoint-file", str(endpoint), **token
    )
    workers = [ShoalProcess("worker", *shared, "--devices", "cpu:1", **token) for _ in range(2)]
    try:
        gateway.wait_for("gateway listens on")
        for worker in workers:
            worker.wait_for("ready in")
        url = json.loads(endpoint.read_text())["url"]
        assert encode(url).status_code == 200
        assert workers[0].leave(signal.SIGTERM) == 0
        assert encode(url).status_code == 200
    finally:
        for process in (*workers, gateway):
            process.leave(signal.SIGTERM)
        nats_server.stop()
