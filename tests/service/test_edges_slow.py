"""Clients that are slow on purpose, many at once, and a neighbour that must not feel it."""

from __future__ import annotations

import json
import socket
import time

import httpx
import pytest

from tests.support.gateway_server import gateway_server
from tests.support.pace import limit_s
from tests.support.raw_http import connect, post, read_all, until

SLOW = 100
TIMEOUT_S = limit_s(1.0)  # of each kind; a machine that is slow opens all connections in it
MOST_UNSENT = 400_000
ENCODE = {"model": "dense", "inputs": ["a"]}
LARGE = {"model": "dense", "inputs": ["word " * 20] * 800}
LARGER = {"model": "dense", "inputs": ["word " * 20] * 2000}
HEAD = b"POST /v1/encode HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def served():
    times = dict.fromkeys(("head_timeout_s", "body_timeout_s", "write_timeout_s"), TIMEOUT_S)
    with gateway_server(send_bytes=4096, **times) as server:
        yield server


def connections(served) -> int:
    return len(served.server.server_state.connections)


def trickle(peers: list[socket.socket], served, seconds: float) -> list[float]:
    """Sends a byte on every connection again and again; returns the times of a neighbour's calls.

    A connection that the server has closed is left alone.
    """
    times = []
    with httpx.Client(base_url=served.url, timeout=limit_s(10)) as neighbour:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for peer in peers:
                try:
                    peer.send(b"x")
                except (BrokenPipeError, ConnectionResetError):
                    continue
            begun = time.monotonic()
            assert neighbour.post("/v1/encode", json=ENCODE).status_code == 200
            times.append(time.monotonic() - begun)
    return times


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (b"\r\n", b""),
        (b"POST /", b"408"),
        (HEAD + b"X-Slow: ", b"408"),
        (HEAD + b"Content-Length: 100000\r\n\r\n", b"408"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"408"),
    ],
    ids=["nothing", "empty lines", "path", "header", "body", "chunk"],
)
def test_edges_slow_senders_are_given_up(served, sent, status):
    """A hundred requests that trickle are ended in time, while a neighbour is served at once."""
    before = connections(served)
    peers = [connect(served.port) for _ in range(SLOW)]
    for peer in peers:
        peer.sendall(sent)
    until(lambda: connections(served) >= before + SLOW)
    times = trickle(peers if status else [], served, TIMEOUT_S / 3)
    assert sorted(times)[len(times) // 2] < TIMEOUT_S / 5
    until(lambda: connections(served) <= before)
    answer = read_all(peers[0])
    assert answer.partition(b" ")[2][:3] == status
    for peer in peers:
        peer.close()


def test_edges_slow_but_steady_sender_is_served(served):
    """A request that takes many small writes and keeps within the time is answered."""
    data = post(ENCODE, "Connection: close")
    with connect(served.port) as peer:
        for at in range(0, len(data), 10):
            peer.sendall(data[at : at + 10])
            time.sleep(0.01)
        assert read_all(peer).startswith(b"HTTP/1.1 200 ")


def test_edges_idle_connection_outlives_the_time_for_a_head(served):
    """A connection that rests between two requests is kept: the time runs for a head only."""
    with connect(served.port) as peer:
        peer.sendall(post(ENCODE))
        assert peer.recv(65536).startswith(b"HTTP/1.1 200 ")
        time.sleep(1.5 * TIMEOUT_S)
        peer.sendall(post(ENCODE))
        assert peer.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_edges_stalled_readers_are_cut_off(served):
    """Readers that stop in the middle of large answers are cut off; a slow one gets all of it."""
    before = connections(served)
    peers = [connect(served.port, receive_bytes=4096) for _ in range(10)]
    for peer in peers:
        peer.sendall(post(LARGE))
    until(lambda: served.server.edge.cut_off >= len(peers), timeout_s=10)
    assert httpx.post(f"{served.url}/v1/encode", json=ENCODE).status_code == 200
    until(lambda: connections(served) <= before)
    for peer in peers:
        peer.close()
    with connect(served.port, receive_bytes=4096) as peer:
        peer.sendall(post(LARGER, "Connection: close"))
        begun, head, got = time.monotonic(), peer.recv(4096), 0
        assert head.startswith(b"HTTP/1.1 200 ")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while part := peer.recv(4096):
            got += len(part)
            time.sleep(TIMEOUT_S / 30)
    assert got + len(head) > length
    assert time.monotonic() - begun > TIMEOUT_S


def test_edges_unsent_answers_are_bounded():
    """What readers leave unsent has a bound: those that stall longest are cut off first."""
    with gateway_server(
        send_bytes=4096, max_unsent_bytes=MOST_UNSENT, write_timeout_s=limit_s(60)
    ) as served:
        peers = []
        for _ in range(12):
            peers.append(connect(served.port, receive_bytes=4096))
            peers[-1].sendall(post(LARGE))
        until(lambda: served.server.edge.cut_off > 0)
        until(lambda: unsent(served) <= MOST_UNSENT)
        assert httpx.post(f"{served.url}/v1/encode", json=ENCODE).status_code == 200
        for peer in peers:
            peer.close()


def unsent(served) -> int:
    open_ = list(served.server.server_state.connections)
    return sum(c.transport.get_write_buffer_size() for c in open_)


def test_edges_connections_are_bounded():
    """One connection too many is told 503 with Retry-After; those that are open are served."""
    with gateway_server(max_connections=20) as served:
        with httpx.Client(base_url=served.url) as early:
            assert early.get("/livez").status_code == 200
            peers = [connect(served.port) for _ in range(19)]
            until(lambda: connections(served) == 20)
            with connect(served.port) as late:
                answer = read_all(late)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in head
            assert json.loads(body)["error"]["code"] == "capacity"
            assert early.get("/livez").status_code == 200
            peers.pop().close()
            until(lambda: connections(served) < 20)
            assert httpx.get(f"{served.url}/livez").status_code == 200
        assert served.server.edge.refused == 1
        for peer in peers:
            peer.close()


def test_edges_slow_clients_do_not_hold_up_a_shutdown():
    """A server that is told to leave does, whatever its clients leave undone."""
    with gateway_server(head_timeout_s=60) as served:
        peers = [connect(served.port) for _ in range(50)]
        for peer in peers[:25]:
            peer.sendall(HEAD)
        for peer in peers[25:40]:
            peer.sendall(post({"model": "dense", "inputs": "hold"}))
        until(lambda: connections(served) == 50)
        begun = time.monotonic()
        served.server.should_exit = True
    assert time.monotonic() - begun < limit_s(4)
    for peer in peers:
        peer.close()
