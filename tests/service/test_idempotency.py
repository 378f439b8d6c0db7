"""`Idempotency-Key` over HTTP: two gateways and a worker on one broker."""

from __future__ import annotations

import json
import signal
import threading
import time
import uuid
from base64 import b64encode

import httpx
import pytest

from shoal.client import Client
from shoal.errors import IdempotencyConflict
from shoal.gateway.idempotency import Idempotency
from shoal.queue.interface import QueueLimits
from shoal.queue.memory import MemoryBroker, MemoryQueue
from tests.conftest import NatsServer
from tests.support.bad_files import WAV, form
from tests.support.gateway_server import gateway_server
from tests.support.metrics import metric
from tests.support.pace import limit_s
from tests.support.shoal_process import NULL_ENTRY, ShoalProcess

pytestmark = pytest.mark.slow

MODELS = {
    "echo": "{}",
    "slow": f"{{sleep_s: {limit_s(1.0):.2f}}}",
    "frail": "{poison: 'the poison'}",
}
ROUTES = {
    "/v1/embeddings": {"model": "echo", "input": "x"},
    "/v1/encode": {"model": "echo", "inputs": "x", "outputs": ["dense", "sparse"]},
    "/v1/score": {"model": "echo", "query": "q", "texts": ["x"]},
    "/v1/rerank": {"model": "echo", "query": "q", "documents": ["x", "y"]},
    "/v1/classify": {"model": "echo", "inputs": "x"},
    "/v1/moderations": {"model": "echo", "input": "x"},
    "/v1/extract": {"model": "names", "inputs": ["x"]},
    "/v1/audio/transcriptions": {
        "model": "sounds",
        "file": {"data": b64encode(WAV).decode()},
        "response_format": "srt",
    },
}
OTHERS = {
    "names": "tasks: [extract]\nextracts: [entities]",
    "sounds": "tasks: [transcribe]\ninputs: [audio]",
}


class Cluster:
    """Gateways and a worker of a pool of their own."""

    def __init__(self, folder, nats_server) -> None:
        for name, options in MODELS.items():
            entry = NULL_ENTRY.format(id=name, options=options)
            (folder / f"{name}.yaml").write_text(f"{entry}pool: idempotent\n")
        for name, fields in OTHERS.items():
            entry = f'id: {name}\nruntime: "null"\nsource: file:///\n{fields}\npool: idempotent\n'
            (folder / f"{name}.yaml").write_text(entry)
        self.shared = ("--nats-url", nats_server.address.url, "--catalog", str(folder))
        self.shared += ("--pool", "idempotent", "--inline-max-bytes", "20000")
        self.token = {"SHOAL_NATS_TOKEN": nats_server.address.token}
        self.folder = folder
        self.processes = [self.start("worker", "--devices", "cpu:1")]
        self.gateways = [self.gateway(), self.gateway()]
        self.processes[0].wait_for("ready in")
        self.urls = [self.url_of(gateway) for gateway in self.gateways]
        for url in self.urls:
            while httpx.get(f"{url}/readyz").status_code != 200:
                time.sleep(0.02)

    def start(self, *arguments) -> ShoalProcess:
        return ShoalProcess(*arguments, *self.shared, **self.token)

    def gateway(self) -> ShoalProcess:
        process = self.start("gateway", "--port", "0")
        self.processes.append(process)
        return process

    @staticmethod
    def url_of(gateway) -> str:
        return gateway.wait_for("gateway listens on").split()[-1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    made = Cluster(tmp_path_factory.mktemp("idempotent"), server)
    yield made
    for process in made.processes:
        process.leave(signal.SIGTERM)
    server.stop()


def post(url, path, body, key, **headers):
    headers = {"idempotency-key": key, "x-shoal-deadline-ms": f"{limit_s(20) * 1e3:.0f}"} | headers
    return httpx.post(f"{url}{path}", json=body, headers=headers, timeout=limit_s(40))


def new_key():
    return uuid.uuid4().hex


@pytest.mark.parametrize("path", ROUTES)
def test_idempotent_retry_gets_the_very_same_answer_from_another_gateway(cluster, path):
    """On every task route the retry's body is that of the first, and says that it was kept."""
    key = new_key()
    first = post(cluster.urls[0], path, ROUTES[path], key)
    again = post(cluster.urls[1], path, ROUTES[path], key)
    assert (first.status_code, again.status_code) == (200, 200)
    assert first.content == again.content
    for header in ("server-timing", "content-type"):
        assert first.headers[header] == again.headers[header]
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert post(cluster.urls[1], path, ROUTES[path], new_key()).status_code == 200


def test_idempotent_form_is_known_by_its_fields(cluster):
    """A retry of a form has another boundary and is the same request; other fields are another."""
    key = new_key()

    def send(boundary, *parts):
        body = form(("model", b"sounds"), ("file=a.wav", WAV), *parts, boundary=boundary)
        headers = {
            "idempotency-key": key,
            "content-type": f"multipart/form-data; boundary={boundary}",
        }
        path = "/v1/audio/transcriptions"
        return httpx.post(
            cluster.urls[0] + path, content=body, headers=headers, timeout=limit_s(40)
        )

    assert send("one").status_code == 200
    assert send("two").headers["idempotent-replayed"] == "true"
    assert send("one", ("language", b"de")).status_code == 422


def test_idempotent_file_is_known_by_its_query(cluster):
    """The query of a body that is a file is part of the request."""
    headers = {"idempotency-key": new_key(), "content-type": "audio/wav"}
    url = f"{cluster.urls[0]}/v1/audio/transcriptions?model=sounds"
    statuses = [
        httpx.post(url + more, content=WAV, headers=headers, timeout=limit_s(40)).status_code
        for more in ("", "", "&language=de")
    ]
    assert statuses == [200, 200, 422]


def test_idempotent_large_answer_comes_again_whole(cluster):
    """An answer over the inline limit is kept in the payload store."""
    body, key = {"model": "echo", "inputs": [f"text {n}" for n in range(1000)]}, new_key()
    answers = [post(url, "/v1/encode", body, key) for url in cluster.urls]
    assert len(answers[0].content) > 20_000
    assert answers[0].content == answers[1].content
    assert "idempotent-replayed" in answers[1].headers


def test_idempotent_retry_during_the_first_waits_for_it(cluster):
    """Two requests at once through two gateways are one run."""
    body, key, answers = {"model": "slow", "query": "q", "documents": ["a", "b"]}, new_key(), []
    callers = [
        threading.Thread(target=lambda u=url: answers.append(post(u, "/v1/rerank", body, key)))
        for url in cluster.urls
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len({a.json()["id"] for a in answers}) == 1, [a.text for a in answers]
    assert sum("idempotent-replayed" in a.headers for a in answers) == 1


def test_idempotent_key_with_another_body_is_a_conflict(cluster):
    """The same key with another body is 422 and names the header; another tenant's is free."""
    key = new_key()
    post(cluster.urls[0], "/v1/encode", ROUTES["/v1/encode"], key)
    other = {"model": "echo", "inputs": "y"}
    answer = post(cluster.urls[1], "/v1/encode", other, key)
    told = answer.json()
    assert (answer.status_code, told["code"]) == (422, "idempotency_conflict")
    assert told["param"] == "Idempotency-Key"
    answer = post(cluster.urls[1], "/v1/encode", other, key, **{"x-shoal-tenant": "another"})
    assert answer.status_code == 200


def test_idempotent_failure_of_the_model_is_not_kept(cluster):
    """A 5xx leaves nothing: the retry runs again."""
    body, key = {"model": "frail", "inputs": "the poison"}, new_key()
    answers = [post(url, "/v1/encode", body, key) for url in cluster.urls]
    assert [a.status_code for a in answers] == [500, 500]
    assert "idempotent-replayed" not in answers[1].headers
    assert answers[0].json()["request_id"] != answers[1].json()["request_id"]


@pytest.mark.parametrize(("fault", "kept"), [("crash", False), ("word " * 100, True)])
def test_idempotent_answer_with_a_fault_that_may_pass_is_not_kept(fault, kept):
    """An input that failed for no fault of its own is run again; one at fault is not."""
    queue = MemoryQueue(MemoryBroker(QueueLimits()))
    keeps = Idempotency(queue, ttl_s=60, inline_max_bytes=20_000)
    with gateway_server(idempotency=keeps) as served:
        body = {"model": "dense", "inputs": ["x", fault]}
        answers = [post(served.url, "/v1/encode", body, "key") for _ in range(2)]
        assert [a.status_code for a in answers] == [200, 200]
        assert [a.json()["errors"][0]["index"] for a in answers] == [1, 1]
        assert ("idempotent-replayed" in answers[1].headers) is kept
        assert len(served.submits.jobs) == (1 if kept else 2)


def test_idempotent_key_of_a_killed_gateway_is_free_again(cluster):
    """After a crash of the gateway that ran the first, the retry runs within a short lease."""
    victim, key = cluster.gateway(), new_key()
    url = cluster.url_of(victim)
    while httpx.get(f"{url}/readyz").status_code != 200:
        time.sleep(0.02)
    body = {"model": "slow", "inputs": "x"}
    failed = []

    def call():
        try:
            post(url, "/v1/encode", body, key, **{"x-shoal-deadline-ms": f"{limit_s(2000):.0f}"})
        except httpx.TransportError as error:
            failed.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    while metric(url, "shoal_gateway_waiting_items") < 1:
        time.sleep(0.01)
    begun = time.monotonic()
    victim.process.kill()
    caller.join()
    assert failed
    answer = post(cluster.urls[0], "/v1/encode", body, key)
    assert answer.status_code == 200, answer.text
    assert "idempotent-replayed" not in answer.headers
    # The lease ends a few seconds after the deadline of the first.
    assert 1 < time.monotonic() - begun < limit_s(12)


def test_idempotent_client_sends_a_key_where_told(cluster):
    """The Python client sends a key of the caller's; with another body it raises the conflict."""
    with Client(cluster.urls[0]) as client:
        first = client.encode(["x"], "echo", idempotency_key="the-client's")
        again = client.encode(["x"], "echo", idempotency_key="the-client's")
        assert (first == again).all()
        with pytest.raises(IdempotencyConflict):
            client.encode(["y"], "echo", idempotency_key="the-client's")
    with Client(cluster.urls[0], idempotency_key="auto") as client:
        assert client.encode(["x"], "echo").shape == client.encode(["y"], "echo").shape


def test_idempotent_wrong_key_is_a_400_and_a_missing_store_a_503():
    """A wrong header is named; where answers cannot be kept a request with a key does not run."""
    with gateway_server() as served:
        body = {"model": "dense", "inputs": "x"}
        answer = post(served.url, "/v1/encode", body, "a b")
        assert (answer.status_code, answer.json()["param"]) == (400, "Idempotency-Key")
        assert post(served.url, "/v1/encode", body, "fine").status_code == 503
        assert served.submits.jobs == []
        assert httpx.post(f"{served.url}/v1/encode", json=body).status_code == 200
        described = json.dumps(httpx.get(f"{served.url}/openapi.json").json())
        assert "Idempotency-Key" in described
        assert "Idempotent-Replayed" in described
