"""`bench/runtimes.py`: what counts as proven, and that texts grow where that is claimed."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.slow

BENCH = Path(__file__).resolve().parents[2] / "bench"
PIECE = 'data: {"index":0,"text":"word "}\n\n'
WHOLE = 'data: {"model":"m","data":[{"index":0,"finish_reason":"stop","tokens":2}]}\n\n'


@pytest.fixture
def cases(monkeypatch):
    """The rooms of the benchmark."""
    monkeypatch.syspath_prepend(str(BENCH))
    from runtime_cases import texts, together

    return texts, together


@pytest.fixture
def answering():
    """A server that gives one answer to everything; its address."""
    servers = []

    def start(status, body):
        class Answer(BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["content-length"]))
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_bench_texts_grow_while_something_is_measured(cases, answering):
    """What they grew by is counted."""
    texts, _ = cases
    with texts.growing(answering(200, PIECE * 2 + WHOLE), ["a", "b"]) as grown:
        threading.Event().wait(0.1)
    assert grown.tokens_per_s > 0


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (429, '{"error":{"code":"queue_full"}}', "queue_full"),
        (503, '{"error":{"code":"model_loading"}}', "model_loading"),
        (200, PIECE + 'data: {"error":{"code":"runtime_crashed"}}\n\n', "runtime_crashed"),
    ],
)
def test_bench_texts_that_do_not_grow_end_it(cases, answering, status, body, said):
    """A text that is refused, or fails when it has begun, is no load beside what is measured."""
    texts, _ = cases
    with pytest.raises(SystemExit, match=said), texts.growing(answering(status, body), ["a"]):
        threading.Event().wait(0.5)


def test_bench_proves_a_runtime_by_all_that_it_was_asked(cases):
    """One call of several that fails is enough against it; so is a text without a word."""
    _, together = cases
    asked = (("one", "yes"), ("two", "yes"), ("two", "it failed"))
    rows = [{"4. runtime": runtime, "answered": answered} for runtime, answered in asked]
    assert together.proven(rows) == {"one"}
    for text, fault in (("Paris.", None), (" \n", "it said nothing")):
        answer = httpx.Response(200, json={"data": [{"text": text}]})
        assert together.fault_of(answer) == fault
    assert together.fault_of(httpx.Response(503, text="loading")) == "loading"
