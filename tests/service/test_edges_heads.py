"""Heads, framings and dialects of HTTP that are too large, contradictory or old."""

from __future__ import annotations

import json
import time

import httpx
import pytest

from shoal.gateway.edge import (
    MAX_CHUNK_NOISE_BYTES,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    MAX_URL_BYTES,
)
from tests.support.gateway_server import gateway_server
from tests.support.pace import limit_s
from tests.support.raw_http import connect, exchange, post, read_all

ENCODE = {"model": "dense", "inputs": ["a"]}
BODY = json.dumps(ENCODE).encode()
LIVE = b"GET /livez HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def served():
    with gateway_server() as server:
        yield server
        # Whatever the tests of this file did, others are served.
        assert httpx.post(f"{server.url}/v1/encode", json=ENCODE).status_code == 200


def status_of(answer: bytes) -> int:
    """The status of the only answer."""
    assert answer.count(b"HTTP/1.1 ") == 1, answer[:500]
    return int(answer.split(b" ", 2)[1])


def code_of(answer: bytes) -> str:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]


def test_edges_head_over_the_limit_is_refused(served):
    """One large header, or many that are large together: 431, whole or in pieces, then close."""
    large = b"X-Large: " + b"x" * MAX_HEAD_BYTES + b"\r\n"
    many = b"".join(b"X-%d: %b\r\n" % (i, b"x" * 700) for i in range(60))
    for head in (large, many):
        answer = exchange(served.port, LIVE + head + b"\r\n")
        assert (status_of(answer), code_of(answer)) == (431, "head_too_large")
    with connect(served.port) as peer:
        peer.sendall(LIVE + b"X-Large: ")
        for _ in range(MAX_HEAD_BYTES // 1000 + 2):
            try:
                peer.sendall(b"x" * 1000)
            except (BrokenPipeError, ConnectionResetError):
                break
        answer = read_all(peer)
    assert not answer or status_of(answer) == 431


def test_edges_head_within_the_limit_is_taken(served):
    """A head just under the limit of bytes, and one with as many headers as may be, are served."""
    large = b"X-Large: " + b"x" * (MAX_HEAD_BYTES - 200) + b"\r\n"
    many = b"".join(b"X-%d: x\r\n" % i for i in range(MAX_HEADERS - 2))
    for head in (large, many):
        answer = exchange(served.port, LIVE + head + b"Connection: close\r\n\r\n")
        assert status_of(answer) == 200


def test_edges_too_many_headers_are_refused(served):
    """One header more than there may be is 431."""
    many = b"".join(b"X-%d: x\r\n" % i for i in range(MAX_HEADERS))
    assert status_of(exchange(served.port, LIVE + many + b"\r\n")) == 431


def test_edges_path_over_the_limit_is_refused(served):
    """A path or a query that is too long is 414."""
    for before in (b"/v1/models/", b"/livez?"):
        target = before + b"x" * MAX_URL_BYTES
        answer = exchange(served.port, b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % target)
        assert (status_of(answer), code_of(answer)) == (414, "path_too_long")


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 99999999999999999999999\r\n",
        b"Content-Length: -5\r\n",
        b"Content-Length: 0x10\r\n",
        b"Content-Length: +5\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Bad Header: x\r\n",
        b": x\r\n",
        b"X: a\0b\r\n",
        b"X: a\rb\r\n",
        b" folded: x\r\n",
    ],
)
def test_edges_contradictory_framing_is_refused(served, lines):
    """Lengths that contradict each other or are none, and broken headers: one 400, then close."""
    data = b"POST /v1/encode HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n0\r\n\r\n" + LIVE + b"\r\n"
    answer = exchange(served.port, data)
    assert (status_of(answer), code_of(answer)) == (400, "invalid_request")


def test_edges_large_length_is_refused_before_the_body(served):
    """The largest length that a parser takes is 413, and no byte of the body is waited for."""
    data = b"POST /v1/encode HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (2**63 - 1)
    assert status_of(exchange(served.port, data)) == 413


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"CONNECT a:1", 400),
        (b"OPTIONS *", 404),
        (b"GET http://other/livez", 200),
        (b"GET /livez#x", 200),
        (b"GET /liv%65z", 200),
        (b"GET /%00%ff%zz", 404),
        ("GET /é".encode(), 400),
        (b"PATCH /v1/encode", 405),
        (b"GARBAGE /livez", 400),
        (b"\x16\x03\x01\x02\x00 TLS", 400),
    ],
)
def test_edges_odd_request_lines_get_an_answer(served, target, status):
    """Methods and targets of other uses of HTTP are answered, never with a 5xx, and never hang."""
    data = target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert status_of(exchange(served.port, data)) == status


def test_edges_http_1_0_is_served_and_closed(served):
    """HTTP/1.0 without a Host, and with a body, is answered; the connection closes. 2.0 is not."""
    data = b"POST /v1/encode HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
    answer = exchange(served.port, data)
    assert status_of(answer) == 200
    assert b"connection: close" in answer
    assert status_of(exchange(served.port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")) == 400


def test_edges_upgrade_is_passed_over(served):
    """Requests that offer another protocol are answered in this one, and the connection is kept."""
    lines = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQ")
    with connect(served.port) as peer:
        for _ in range(2):
            peer.sendall(post(ENCODE, *lines))
            assert peer.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(("body", "status"), [(BODY, 400), (b"", 200)])
def test_edges_upgrade_in_pieces_is_answered(served, body, status):
    """An offer that arrives in pieces costs the connection, and its body is not lost unsaid."""
    length = b"Content-Length: %d\r\n" % len(body) if body else b""
    line = b"POST /v1/encode" if body else b"GET /livez"
    head = line + b" HTTP/1.1\r\n" + length + b"Connection: Upgrade\r\nUpg"
    with connect(served.port) as peer:
        peer.sendall(head)
        time.sleep(0.05)
        peer.sendall(b"rade: h2c\r\n\r\n" + body)
        answer = read_all(peer)
    assert status_of(answer) == status


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    head = b"POST /v1/encode HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(chunks) + end


def test_edges_chunk_names_and_trailers_are_passed_over(served):
    """Chunk extensions and a trailer mean nothing and harm nothing."""
    size = b"%x;name=value\r\n" % len(BODY)
    with connect(served.port) as peer:
        peer.sendall(chunked(size + BODY + b"\r\n", end=b"0;last\r\nX-Trailer: x\r\n\r\n"))
        assert peer.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("start", [b"1;", b"0\r\nX-Trailer: "], ids=["chunk name", "trailer"])
def test_edges_endless_chunk_noise_is_refused(served, start):
    """What is sent beside the bytes of a chunked body is bounded: 400, then close."""
    answer = b""
    with connect(served.port) as peer:
        peer.sendall(chunked(end=start))
        try:
            # Far more than the limit, for the system takes megabytes that nobody has read yet.
            for _ in range(1000):
                peer.sendall(b"x" * MAX_CHUNK_NOISE_BYTES)
        except (BrokenPipeError, ConnectionResetError):
            pass
        else:
            pytest.fail("it was read on and on")
        answer = read_all(peer)
    assert not answer or status_of(answer) == 400


@pytest.mark.parametrize(
    "chunk", [b"zz\r\n", b"-1\r\n", b"ffffffffffffffffff\r\n", b"5\r\nabcdefgh"]
)
def test_edges_broken_chunk_is_refused(served, chunk):
    """A chunk whose length is none, or is not kept, is 400."""
    assert status_of(exchange(served.port, chunked(chunk))) == 400


def test_edges_requests_sent_ahead_are_bounded(served):
    """As many requests as may be sent ahead are answered in order; of a flood, only some are."""
    count = MAX_PIPELINED
    last = LIVE + b"Connection: close\r\n\r\n"
    answer = exchange(served.port, (LIVE + b"\r\n") * count + last)
    assert answer.count(b"HTTP/1.1 200 ") == count + 1
    flood = exchange(served.port, (LIVE + b"\r\n") * 5_000)
    assert flood.count(b"HTTP/1.1 ") <= count + 1


def test_edges_nonsense_behind_a_request_is_no_answer_to_it(served):
    """A broken message behind an open request never gets the answer that is that request's."""
    with connect(served.port) as peer:
        peer.sendall(post({"model": "dense", "inputs": "hold"}) + b"NONSENSE\r\n\r\n")
        assert read_all(peer) == b""


def test_edges_deep_nesting_is_refused(served):
    """Bodies nested a million deep, in either form, are a 400 and not a crash."""
    deep_json = b'{"model":"dense","inputs":' + b"[" * 1_000_000
    deep_pack = b"\x82\xa5model\xa5dense\xa6inputs" + b"\x91" * 1_000_000
    for body, form in ((deep_json, "application/json"), (deep_pack, "application/msgpack")):
        answer = httpx.post(f"{served.url}/v1/encode", content=body, headers={"content-type": form})
        assert answer.status_code == 400


def test_edges_body_of_small_lists_is_bounded_by_its_own_size(served):
    """Millions of empty lists are refused by the number of inputs, before any is looked into."""
    body = b'{"model":"dense","input":[' + b"[1]," * 2_000_000 + b"[1]]}"
    answer = httpx.post(f"{served.url}/v1/embeddings", content=body, timeout=limit_s(20))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
