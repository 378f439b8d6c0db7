"""The HTTP edge over real sockets: bodies, headers, clients that leave, health."""

from __future__ import annotations

import json
import logging
import socket
import time

import httpx
import msgspec
import numpy as np
import pytest

from shoal.clock import wall
from shoal.gateway.visit import GRACE_S
from tests.support.gateway_server import gateway_server
from tests.support.local_submits import vector
from tests.support.pace import limit_s

ENCODE = {"model": "dense", "inputs": ["a", "b"]}
# A machine that is slow sends a whole body in it, too.
BODY_TIMEOUT_S = limit_s(0.8)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def served():
    with gateway_server(max_body_bytes=100_000, body_timeout_s=BODY_TIMEOUT_S) as server:
        yield server


@pytest.fixture
def client(served):
    with httpx.Client(base_url=served.url, timeout=limit_s(10)) as client:
        yield client


def connect(served):
    peer = socket.create_connection(("127.0.0.1", served.port))
    peer.settimeout(limit_s(10))
    return peer


def head(*lines, path="/v1/encode"):
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


def read_all(peer):
    parts = []
    while part := peer.recv(65536):
        parts.append(part)
    return b"".join(parts)


def until(condition, timeout_s=5.0):
    give_up = time.monotonic() + limit_s(timeout_s)
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_gateway_http_answers_in_the_form_that_accept_names(client):
    """Content-Type and Accept are independent of each other: all four combinations agree."""
    expected = np.stack([vector("a"), vector("b")])
    codecs = {"application/json": msgspec.json, "application/msgpack": msgspec.msgpack}
    for sent, encoder in codecs.items():
        for wanted, decoder in codecs.items():
            headers = {"content-type": f"{sent}; charset=utf-8", "accept": wanted}
            answer = client.post("/v1/encode", content=encoder.encode(ENCODE), headers=headers)
            assert answer.headers["content-type"] == wanted
            dense = decoder.decode(answer.content)["dense"]
            if wanted == "application/msgpack":
                assert (dense["dtype"], dense["shape"]) == ("float32", [2, 8])
                dense = np.frombuffer(dense["data"], "<f4").reshape(2, 8)
            assert np.array_equal(np.array(dense, np.float32), expected)


def test_gateway_http_takes_json_without_a_content_type(client):
    """A body without a Content-Type is read as JSON, and an odd Accept gets JSON."""
    content = json.dumps(ENCODE).encode()
    answer = client.post("/v1/encode", content=content, headers={"accept": "text/html"})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"


def test_gateway_http_passes_nul_and_odd_text_through(client, served):
    """NUL characters and text outside the basic plane reach the submit path as they were."""
    texts = ["a\0b", "\U0001d4b3 🐟 \u202e", " ", "\n"]
    assert client.post("/v1/encode", json={**ENCODE, "inputs": texts}).status_code == 200
    assert served.submits.jobs[-1].inputs.texts == texts


def test_gateway_http_last_of_duplicate_keys_counts(client, served):
    """A key that is given twice has its last value, as in every common JSON reader."""
    body = b'{"model":"nonsense","inputs":"a","model":"dense","inputs":"b"}'
    assert client.post("/v1/encode", content=body).status_code == 200
    assert served.submits.jobs[-1].inputs.texts == ["b"]


def test_gateway_http_carries_lane_deadline_and_trace_into_the_job(client, served):
    """The steering headers arrive in the job; a deadline over the limit is cut to it."""
    headers = {"x-shoal-lane": "bulk", "x-shoal-deadline-ms": "1500", "traceparent": TRACE}
    headers["x-shoal-tenant"] = "team-7"
    client.post("/v1/encode", json=ENCODE, headers=headers)
    job = served.submits.jobs[-1]
    assert (job.lane, job.tenant, job.traceparent) == ("bulk", "team-7", TRACE)
    assert 0 < job.deadline_s - wall() <= 1.5
    headers = {"x-shoal-deadline-ms": "1e12", "traceparent": "nonsense"}
    client.post("/v1/encode", json=ENCODE, headers=headers)
    job = served.submits.jobs[-1]
    assert (job.lane, job.traceparent) == ("interactive", None)
    assert 590 < job.deadline_s - wall() <= 600


def test_gateway_http_echoes_a_sane_request_id_and_replaces_others(client, served):
    """X-Request-Id comes back when it is short and plain; else a new, unique one is made."""
    for good in ("abc-123", "x" * 128):
        answer = client.post("/v1/encode", json=ENCODE, headers={"x-request-id": good})
        assert answer.headers["x-request-id"] == served.submits.jobs[-1].request_id == good
    made = set()
    for bad in ("", "a b", "x" * 129, "é", 'a"b'):
        headers = [(b"x-request-id", bad.encode())]
        answer = client.post("/v1/encode", json=ENCODE, headers=headers)
        assert answer.headers["x-request-id"] != bad
        made.add(answer.headers["x-request-id"])
    assert len(made) == 5


def test_gateway_http_tells_where_the_time_went(client):
    """Server-Timing has queue, load and run in milliseconds."""
    answer = client.post("/v1/encode", json=ENCODE)
    assert answer.headers["server-timing"] == "queue;dur=1.00, load;dur=0.00, run;dur=2.00"


@pytest.mark.parametrize(
    ("text", "status", "after"),
    [
        ("fail:queue_full:2.1", 429, "3"),
        ("fail:queue_full", 429, "1"),
        ("fail:model_loading:0.2", 503, "1"),
        ("fail:no_worker", 503, "1"),
        ("fail:run_failed", 500, None),
        ("fail:deadline_exceeded:9", 504, None),
    ],
)
def test_gateway_http_says_when_to_try_again(client, text, status, after):
    """429 and 503 carry Retry-After in whole seconds, at least one; other errors do not."""
    answer = client.post("/v1/encode", json={"model": "dense", "inputs": text})
    assert (answer.status_code, answer.headers.get("retry-after")) == (status, after)
    assert answer.json()["code"] == text.split(":")[1]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": "w " * 70}, "input"),
        ("/v1/embeddings", {"input": ["a", "w " * 70]}, "input[1]"),
        ("/v1/encode", {"inputs": "w " * 70}, "inputs"),
        ("/v1/encode", {"inputs": ["w " * 70]}, "inputs[0]"),
        ("/v1/rerank", {"query": "q", "documents": ["a", "w " * 70]}, "documents[1]"),
        ("/v1/score", {"query": "q", "texts": ["w " * 70]}, "texts[0]"),
        ("/v1/score", {"query": "q", "documents": ["w " * 70]}, "documents[0]"),
    ],
)
def test_gateway_http_names_the_over_long_input_as_the_route_does(client, path, body, param):
    """A worker's `inputs[i]` becomes the field of the route; `truncate` turns it into an answer."""
    answer = client.post(path, json={"model": "dense", **body})
    error = answer.json().get("error", answer.json())
    assert (answer.status_code, error["code"]) == (400, "input_too_long")
    assert error["param"] == param
    assert f"`{param}`" in error["message"]
    answer = client.post(path, json={"model": "dense", "truncate": True, **body})
    assert answer.status_code == 200


def test_gateway_http_survives_a_bug(client, caplog):
    """An unforeseen exception is a logged 500 with the request id, and the process lives."""
    with caplog.at_level(logging.ERROR, "shoal.gateway"):
        answer = client.post("/v1/embeddings", json={"model": "dense", "input": "boom"})
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("internal_error", "server_error")
    assert "a bug in the submit path" not in answer.text
    assert any(error["request_id"] in record.getMessage() for record in caplog.records)
    assert client.post("/v1/encode", json=ENCODE).status_code == 200


def test_gateway_http_refuses_a_large_body_before_it_is_sent(served):
    """A Content-Length over the limit is 413 without its body, and the connection closes."""
    with connect(served) as peer:
        peer.sendall(head("Content-Length: 100000000"))
        answer = peer.recv(65536)  # a body that is waited for is 408
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in answer
        read_all(peer)  # the server closes although the body never came


def test_gateway_http_stops_reading_a_chunked_body_at_the_limit(served):
    """A body without a length is cut off at the limit, and its sender still reads the 413."""
    with connect(served) as peer:
        peer.sendall(head("Transfer-Encoding: chunked"))
        chunk = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
        for _ in range(12):
            peer.sendall(chunk)
        assert peer.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_gateway_http_takes_a_chunked_body(client):
    """A body in pieces and without a length is read like any other."""
    content = json.dumps(ENCODE).encode()
    answer = client.post("/v1/encode", content=(content[i : i + 7] for i in range(0, 60, 7)))
    assert answer.status_code == 200


@pytest.mark.parametrize("sent", [b"", b'{"model":'])
def test_gateway_http_gives_up_on_a_slow_body(served, sent):
    """A body that does not arrive within the timeout is 408, and the connection closes."""
    with connect(served) as peer:
        started = time.monotonic()
        peer.sendall(head("Content-Length: 60") + sent)
        answer = peer.recv(65536)
        assert BODY_TIMEOUT_S - 0.1 < time.monotonic() - started < BODY_TIMEOUT_S + limit_s(5)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in answer


def test_gateway_http_cancels_the_job_of_a_client_that_leaves(served, client):
    """When the connection closes, the running job is cancelled, and the 499 is counted."""
    body = json.dumps({"model": "dense", "inputs": "hold"}).encode()
    with connect(served) as peer:
        lines = [f"Content-Length: {len(body)}", "X-Request-Id: leaver"]
        peer.sendall(head(*lines) + body)
        until(lambda: served.submits.jobs[-1].request_id == "leaver")
        assert "leaver" not in served.submits.cancelled
    until(lambda: "leaver" in served.submits.cancelled)
    metric = 'shoal_gateway_requests_total{route="encode",status="499"} 1.0'
    until(lambda: metric in client.get("/metrics").text)


@pytest.mark.parametrize("pad", [0, 80_000], ids=["small", "large"])
def test_gateway_http_notices_at_once_that_a_client_leaves(monkeypatch, pad):
    """A job is withdrawn without a look around, after a body that pauses reading too."""
    inputs = ["hold", *["x" * 1000] * (pad // 1000)]
    body = json.dumps({"model": "dense", "inputs": inputs}).encode()
    with gateway_server(max_body_bytes=100_000) as served:
        monkeypatch.setattr(served.app._attendant, "round", lambda _: None)
        for n in range(2):
            with connect(served) as peer:
                peer.sendall(head(f"Content-Length: {len(body)}") + body)
                until(lambda n=n: len(served.submits.jobs) == n + 1)
            until(lambda n=n: len(served.submits.cancelled) == n + 1)


def test_gateway_http_watches_a_client_whose_body_was_slow(served):
    """A client whose body took long and that leaves later is noticed as well."""
    body = json.dumps({"model": "dense", "inputs": "hold"}).encode()
    with connect(served) as peer:
        peer.sendall(head(f"Content-Length: {len(body)}", "X-Request-Id: slow-leaver"))
        time.sleep(2.2 * GRACE_S)  # well under the body's timeout
        peer.sendall(body)
        until(lambda: served.submits.jobs[-1].request_id == "slow-leaver")
    until(lambda: "slow-leaver" in served.submits.cancelled)


def test_gateway_http_keeps_the_connection_after_an_error(client):
    """A wrong request that was read whole does not cost its connection."""
    for _ in range(3):
        assert client.post("/v1/encode", content=b"{").headers.get("connection") != "close"


def test_gateway_http_answers_pipelined_requests_in_order(served):
    """Two requests in one write get their own answers, in order."""
    with connect(served) as peer:
        for name in ("one", "two"):
            body = json.dumps({"model": "dense", "inputs": name}).encode()
            close = ["Connection: close"] if name == "two" else []
            peer.sendall(head(f"Content-Length: {len(body)}", f"X-Request-Id: {name}", *close))
            peer.sendall(body)
        answers = read_all(peer)
    assert answers.count(b"HTTP/1.1 200 ") == 2
    assert answers.index(b"x-request-id: one") < answers.index(b"x-request-id: two")


def test_gateway_http_bounds_the_open_requests():
    """One request more than `max_open_requests` is 429; health is still answered."""
    with gateway_server(max_open_requests=1) as served, connect(served) as peer:
        body = json.dumps({"model": "dense", "inputs": "hold"}).encode()
        peer.sendall(head(f"Content-Length: {len(body)}") + body)
        until(lambda: served.submits.jobs)
        answer = httpx.post(f"{served.url}/v1/encode", json=ENCODE, timeout=limit_s(10))
        assert (answer.status_code, answer.json()["code"]) == (429, "queue_full")
        assert httpx.get(f"{served.url}/readyz").status_code == 200


def test_gateway_http_health(served, client):
    """/livez says that the process lives; /readyz follows the submit path and draining."""
    assert client.get("/livez").json() == {"status": "alive"}
    assert client.get("/readyz").json() == {"status": "ready"}
    served.submits.not_ready = "the broker is away"
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json() == {"status": "not ready", "reason": "the broker is away"}
    served.submits.not_ready = None
    served.app.draining = True
    assert client.get("/readyz").status_code == 503
    assert client.get("/livez").status_code == 200
    served.app.draining = False
    assert client.get("/readyz").status_code == 200


def test_gateway_http_counts_requests(client):
    """/metrics has requests by route and status, times, bytes, inputs and tokens."""
    client.post("/v1/score", json={"model": "dense", "query": "q", "texts": ["a", "b c"]})
    text = client.get("/metrics").text
    for line in (
        'shoal_gateway_requests_total{route="score",status="200"}',
        'shoal_gateway_request_seconds_bucket{le="+Inf",route="score"}',
        'shoal_gateway_bytes_total{direction="in",route="score"}',
        'shoal_gateway_inputs_total{route="score"}',
        'shoal_gateway_tokens_total{route="score"}',
        "shoal_gateway_open_requests 1.0",
    ):
        assert line in text


def test_gateway_http_head_has_no_body(client):
    """HEAD is GET without the body."""
    answer = client.head("/livez")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == "18"


def test_gateway_http_405_names_the_methods(client):
    """A wrong method is told the right ones in Allow."""
    assert client.get("/v1/encode").headers["allow"] == "POST"
    assert client.delete("/readyz").headers["allow"] == "GET, HEAD"


def test_gateway_http_models_by_every_name(client):
    """A model card is found by id with a slash, by alias and with its revision."""
    for name in ("org/both", "org%2Fboth", "org/both@2"):
        card = client.get(f"/v1/models/{name}").json()
        assert (card["id"], card["outputs"]) == ("org/both", {"dense": 8, "sparse": 1000})
    card = client.get("/v1/models/org/Dense-Model").json()
    assert (card["id"], card["state"]) == ("dense", "resident")
    assert client.get("/v1/models/nope").status_code == 404
    assert client.get("/v1/models/").status_code == 404


def test_gateway_http_docs_page_needs_no_other_host(client):
    """/docs is one page that loads nothing from elsewhere; / leads to it."""
    answer = client.get("/", follow_redirects=True)
    assert answer.headers["content-type"].startswith("text/html")
    assert "://" not in answer.text
    assert "connect-src 'self'" in answer.headers["content-security-policy"]
