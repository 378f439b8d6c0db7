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
from tests.support.pace import limit_s
from tests.support.shoal_process import NULL_ENTRY, Serve, ShoalProcess

FAST = ("--devices", "cpu:1", "--ack-wait-s", "1")


def encode(url, text="x", model="echo", timeout_s=60.0):
    body = {"model": model, "inputs": text}
    return httpx.post(f"{url}/v1/encode", json=body, timeout=timeout_s)


@pytest.fixture
def serve(tmp_path):
    server = Serve(tmp_path, *FAST, models={"echo": "{}", "slow": "{sleep_s: 1.0}"})
    yield server
    server.leave(signal.SIGKILL)


def test_serve_life_prints_and_writes_the_chosen_port(serve):
    """Port 0 works: the printed address and endpoint.json name the same open port."""
    written = json.loads((serve.folder / "data" / "endpoint.json").read_text())
    assert written["url"] == serve.url
    assert httpx.get(f"{written['url']}/readyz").status_code == 200


def test_serve_life_ctrl_c_finishes_what_is_open(serve):
    """A request that runs when Ctrl-C comes is answered; then everything leaves, in seconds."""
    encode(serve.url, model="slow")
    answers = []
    caller = threading.Thread(target=lambda: answers.append(encode(serve.url, model="slow")))
    caller.start()
    time.sleep(0.4)
    family = psutil.Process(serve.process.pid).children(recursive=True)
    begun = time.monotonic()
    assert serve.leave() == 0, serve.output
    assert time.monotonic() - begun < limit_s(6)
    assert not (serve.folder / "data" / "endpoint.json").exists()
    caller.join()
    assert answers[0].status_code == 200
    assert not [p for p in family if p.is_running()]


def test_serve_life_children_die_when_the_parent_is_killed(serve):
    """SIGKILL of `shoal serve` leaves no broker, gateway, worker or runtime behind."""
    encode(serve.url)
    family = psutil.Process(serve.process.pid).children(recursive=True)
    assert len(family) >= 4
    serve.leave(signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=limit_s(5))
    assert alive == []


def test_serve_life_runtime_is_started_again_after_a_crash(serve):
    """A killed runtime process costs no request: its items run again in a new one."""
    encode(serve.url, model="slow")
    answers = []
    caller = threading.Thread(target=lambda: answers.append(encode(serve.url, model="slow")))
    caller.start()
    time.sleep(0.4)
    for process in serve.children("shoal.runtimes.host"):
        process.kill()
    caller.join()
    assert answers[0].status_code == 200, answers[0].text


def test_serve_life_runtime_that_hangs_is_started_again(tmp_path):
    """A runtime that stands still is ended after the time it may take; its items run again."""
    flags = (*FAST, "--run-timeout-s", "1.5")
    server = Serve(tmp_path, *flags, models={"echo": "{}"})
    try:
        encode(server.url)
        for process in server.children("shoal.runtimes.host"):
            process.suspend()
        answer = encode(server.url, "after the hang")
        assert answer.status_code == 200, answer.text
        assert "hangs" in server.output
    finally:
        server.leave()


@pytest.mark.parametrize("part", ["shoal worker", "shoal gateway", "nats.conf"])
def test_serve_life_parts_are_started_again_after_a_crash(serve, part):
    """After the worker, the gateway or the broker is killed, requests are served again."""
    encode(serve.url)
    for process in serve.children(part):
        process.kill()
    give_up = time.monotonic() + limit_s(20)
    while True:
        try:
            url = json.loads((serve.folder / "data" / "endpoint.json").read_text())["url"]
            if encode(url, timeout_s=10).status_code == 200:
                break
        except (httpx.HTTPError, OSError):
            time.sleep(0.05)
        assert time.monotonic() < give_up, serve.output


def test_serve_life_worker_crash_loses_no_item(serve):
    """What a killed worker held is answered by its successor."""
    encode(serve.url, model="slow")
    answers = []
    callers = [
        threading.Thread(target=lambda: answers.append(encode(serve.url, model="slow")))
        for _ in range(3)
    ]
    for caller in callers:
        caller.start()
    time.sleep(0.4)
    for process in serve.children("shoal worker"):
        process.kill()
    for caller in callers:
        caller.join()
    assert [a.status_code for a in answers] == [200, 200, 200], [a.text for a in answers]


def test_serve_life_refuses_a_taken_port_and_a_taken_folder(serve):
    """A second start says what is in its way, in one line, with exit status 2."""
    port = serve.url.rpartition(":")[2]
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


def test_serve_life_model_that_cannot_be_served_says_why(tmp_path):
    """A runtime that is not there, and weights that do not load, are a 503 with the reason."""
    catalog = tmp_path / "catalog"
    catalog.mkdir()
    (catalog / "a.yaml").write_text(
        NULL_ENTRY.format(id="alien", options="{}").replace('"null"', "warp-drive")
    )
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    (broken / "tokenizer.json").write_text("{}")
    (catalog / "b.yaml").write_text(
        f"id: broken\ntasks: [encode]\nsource: file://{broken}\noutputs: {{dense: {{dim: 4}}}}\n"
    )
    server = Serve(tmp_path, *FAST, "--catalog", str(catalog))
    try:
        answer = encode(server.url, model="alien")
        assert (answer.status_code, answer.json()["code"]) == (503, "no_worker")
        assert "warp-drive" in answer.json()["message"]
        answer = encode(server.url, model="broken")
        assert (answer.status_code, answer.json()["code"]) == (503, "model_unavailable")
    finally:
        server.leave()
