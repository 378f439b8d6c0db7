"""A runtime process that fails everything: it is replaced, and where that is no cure it rests."""

from __future__ import annotations

import httpx
import pytest

from tests.support.pace import limit_s
from tests.support.raw_http import until
from tests.support.shoal_process import Serve

pytestmark = pytest.mark.slow

MODELS = {
    "tires": "{sick_after: 6}",
    "never": "{sick_after: 0}",
    "frail": "{poison: 'the poison'}",
    "well": "{}",
}


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    server = Serve(tmp_path_factory.mktemp("sick"), "--devices", "cpu:1", models=MODELS)
    yield server
    assert server.leave() == 0, server.output


def ask(serve, model, text="x"):
    answer = serve.post("/v1/encode", {"model": model, "inputs": text})
    return "ok" if answer.status_code == 200 else answer.json()["code"]


def ready(serve):
    return httpx.get(f"{serve.url}/readyz", timeout=limit_s(10)).json()


def test_sick_process_is_started_anew(serve):
    """After three failures in a row, none of them an item's, the next are served again."""
    said = [ask(serve, "tires") for _ in range(24)]
    assert said.count("ok") >= 12, said
    assert "run_failed" in said
    assert max(len(run) for run in "".join("f" if s != "ok" else " " for s in said).split()) <= 4
    assert "fails every batch" in serve.output


def test_sick_model_rests_and_says_so(serve):
    """Where a new process fails as well, the model is refused for a while; others are served."""

    def rests():
        return ask(serve, "never") == "model_unavailable"

    until(rests, timeout_s=30)
    until(lambda: "fails every batch" in ready(serve).get("models", {}).get("never@1", ""))
    assert ready(serve)["status"] == "ready"
    assert ask(serve, "well") == "ok"
    until(lambda: ask(serve, "never") == "run_failed", timeout_s=30)  # it is tried again


def test_bad_items_alone_do_not_stop_a_model(serve):
    """However many bad items a client sends: what came out well before does, and all goes on."""
    assert ask(serve, "frail") == "ok"
    [pid] = {child.pid for child in serve.children("--runtime null")}
    for _ in range(12):
        assert ask(serve, "frail", "the poison") == "run_failed"
    assert ask(serve, "frail") == "ok"
    assert pid in {child.pid for child in serve.children("--runtime null")}
