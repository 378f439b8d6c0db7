"""Weights from a hub and from an object store, over real HTTP, through the libraries' clients."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading

import httpx
import numpy as np
import pytest
from obstore.store import S3Store

from shoal.catalog.resolve import model_spec, tokenizer_path, why_absent
from shoal.catalog.schema import Entry, Output
from shoal.errors import ModelUnavailable, WeightsMissing
from shoal.ipc.messages import RunItem
from shoal.runtimes.registry import create
from tests.support.hub_server import Hub
from tests.support.pace import limit_s
from tests.support.ports import free_port
from tests.support.raw_http import until
from tests.support.runtime_models import SPLADE, dense_rows, package_path, random_ids

pytestmark = pytest.mark.slow

REPO = "shoal-test/tiny"
FILES = {
    "config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 4096,
    "pytorch_model.bin": b"pickle",
    "tokenizer.json": b'{"model": {}}',
}
FETCH = """
import json, sys
from pathlib import Path
from shoal.catalog.resolve import model_spec
from shoal.catalog.schema import Entry
from shoal.errors import ShoalError

told = []
entry = Entry(id="m", tasks=["encode"], source=sys.argv[1], digests=json.loads(sys.argv[3]))
try:
    path = model_spec(entry, Path(sys.argv[2]), lambda *progress: told.append(progress)).path
except ShoalError as error:
    print(json.dumps({"code": error.code, "message": error.message}))
else:
    files = sorted(f.name for f in Path(path).rglob("*") if not f.name.startswith("."))
    print(json.dumps({"path": path, "files": files, "told": told}))
"""


def fetching(source, cache_dir, digests=None, **environment):
    """A process that fetches a source into a cache folder."""
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, source, str(cache_dir), json.dumps(digests or {})],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def outcome(process):
    output, _ = process.communicate(timeout=limit_s(60))
    assert process.returncode == 0
    return json.loads(output)


@pytest.fixture
def hub():
    """A hub with one small model."""
    hub = Hub(REPO, FILES)
    yield hub
    hub.close()


@pytest.fixture(scope="module")
def s3():
    """The environment in which an S3 server on this machine answers; its bucket is `models`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def answers():
        try:
            return httpx.put(f"{url}/models").is_success
        except httpx.TransportError:
            return False

    until(answers, timeout_s=30)
    yield {
        "AWS_ENDPOINT_URL": url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    server.terminate()
    server.wait()


@pytest.fixture
def s3_here(s3, monkeypatch):
    """The same, for this process."""
    for name, value in s3.items():
        monkeypatch.setenv(name, value)


def test_fetch_from_a_hub_brings_the_wanted_files_and_tells_how_far_it_is(hub, tmp_path):
    """A pinned model comes without its pickle, progress reaches the end, and it comes once."""
    source = f"hf://{REPO}@v1"
    first = outcome(fetching(source, tmp_path, HF_ENDPOINT=hub.url))
    assert first["files"] == ["config.json", "model.safetensors", "tokenizer.json"]
    total_bytes = sum(len(body) for name, body in FILES.items() if name in first["files"])
    assert first["told"][-1] == [total_bytes, total_bytes]
    fetched = list(hub.fetched)
    assert outcome(fetching(source, tmp_path, HF_ENDPOINT=hub.url))["files"] == first["files"]
    assert hub.fetched == fetched


def test_fetch_from_a_hub_offline_takes_what_is_there_and_says_what_is_not(hub, tmp_path):
    """Told to be offline, or with the hub away, a kept model is found and another is a clear error.

    A file that is not the one that the entry means is refused all the same.
    """
    source = f"hf://{REPO}@{hub.commit}"
    outcome(fetching(source, tmp_path, HF_ENDPOINT=hub.url))
    offline = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "1"}
    assert "model.safetensors" in outcome(fetching(source, tmp_path, **offline))["files"]
    unknown = outcome(fetching("hf://shoal-test/none@v1", tmp_path, **offline))
    assert unknown["code"] == "weights_missing"
    assert "hf://shoal-test/none@v1 cannot be fetched" in unknown["message"]
    assert str(tmp_path) in unknown["message"]
    wrong = {"model.safetensors": "0" * 64}
    assert outcome(fetching(source, tmp_path, wrong, **offline))["code"] == "model_unavailable"


def test_fetch_from_a_hub_that_hangs_up_is_a_clear_error(tmp_path):
    """A server that closes every connection, which the client tells with its transport's errors."""

    def hang_up():
        while (connection := listener.accept()[0]).recv(65_536) != b"enough":
            connection.close()
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        host, port = listener.getsockname()
        refused = outcome(fetching("hf://a/b@v1", tmp_path, HF_ENDPOINT=f"http://{host}:{port}"))
        with socket.create_connection((host, port)) as end:
            end.sendall(b"enough")
        thread.join()
    assert refused["code"] == "weights_missing"
    assert "hf://a/b@v1 cannot be fetched" in refused["message"]


def test_fetch_from_s3_gives_a_model_that_runs(s3_here, tmp_path):
    """A real model goes to S3 and comes back: compared, loaded, and with the same numbers."""
    folder = package_path(SPLADE)
    store = S3Store("models", prefix="relevance/tiny")
    for path in folder.iterdir():
        store.put(path.name, path)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    fields = {"tasks": ["encode"], "outputs": {"dense": Output(dim=128)}}
    here = Entry(id="here", source=f"file://{folder}", **fields)
    there = Entry(
        id="there",
        source="s3://models/relevance/tiny",
        digests={"model.safetensors": digest},
        **fields,
    )
    assert why_absent(there) is None
    told = []
    runtime = create("onnx", "cpu", 1)
    item = RunItem("i", "encode", [9], ids=np.array(random_ids(9), "<u2").tobytes())
    rows = []
    for entry in (here, there):
        spec = model_spec(entry, tmp_path, lambda *progress: told.append(progress))
        runtime.load(spec)
        rows.append(dense_rows(runtime.run(spec.key, [item])))
    assert np.array_equal(*rows)
    done_bytes, total_bytes = max(told)
    assert done_bytes == total_bytes > (folder / "model.safetensors").stat().st_size
    assert tokenizer_path(there, tmp_path).read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_fetch_from_s3_refuses_what_is_not_meant_or_not_there(s3_here, tmp_path):
    """A wrong digest and an empty folder are errors, and a mended file is found by the next try."""
    store = S3Store("models", prefix="changing")
    store.put("model.onnx", b"wrong")
    good = {"model.onnx": hashlib.sha256(b"right").hexdigest()}
    entry = Entry(id="m", tasks=["encode"], source="s3://models/changing", digests=good)
    with pytest.raises(ModelUnavailable, match="is not what its entry means"):
        model_spec(entry, tmp_path)
    store.put("model.onnx", b"right")
    assert model_spec(entry, tmp_path).path
    empty = Entry(id="n", tasks=["encode"], source="s3://models/nothing/here")
    with pytest.raises(WeightsMissing, match="none of its 0 objects"):
        model_spec(empty, tmp_path)


def test_fetch_from_s3_by_several_processes_at_once_is_whole(s3, s3_here, tmp_path):
    """Processes that want the same model at once all find all of it."""
    store = S3Store("models", prefix="wanted")
    for name, body in FILES.items():
        store.put(name, body)
    digests = {
        name: hashlib.sha256(body).hexdigest()
        for name, body in FILES.items()
        if not name.endswith(".bin")
    }
    processes = [fetching("s3://models/wanted", tmp_path, digests, **s3) for _ in range(3)]
    found = [outcome(process) for process in processes]
    assert [each.get("files") for each in found] == [sorted(digests)] * len(found), found
    assert len({each["path"] for each in found}) == 1
