"""The runtime `sglang` and a server that is at fault, silent, or another's."""

from __future__ import annotations

import asyncio
import os
import queue
import shutil
import socket
import stat
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import psutil
import pytest

from shoal.errors import DeadlineExceeded, ModelUnavailable, OutOfMemory, RunFailed
from shoal.ipc.messages import AdapterSpec, RunItem
from shoal.runtimes.sglang.contract import Contract
from shoal.runtimes.sglang.embedder import Embedder
from shoal.runtimes.sglang.runtime import SglangRuntime
from shoal.runtimes.sglang.server import Server, free_port
from shoal.runtimes.unpacked import MAX_UNPACKED, keep_last
from shoal.wire.envelope import Result
from shoal.wire.generation import Generated, Piece
from tests.support.candle_texts import Tiny
from tests.support.runtime_models import array, spec
from tests.support.sglang_cases import ADAPTER, KEY, OPTIONS, STUCK, WRITTEN, case
from tests.support.talking_server import LINES

pytestmark = pytest.mark.slow

REPLAY = "tests.support.sglang_replay"
TALKING = "tests.support.talking_server"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def adapter(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    tiny.adapter(folder, 1)
    return str(folder)


@pytest.fixture(scope="module")
def lost():
    return threading.Event()


@pytest.fixture(scope="module")
def served(tiny, lost):
    """A model on a replayed server, with room for one adapter."""
    runtime = SglangRuntime(device="cpu", threads=1, on_lost=lost.set, module=REPLAY)
    options = OPTIONS | {"max_adapters": 1}
    runtime.load(
        spec(
            *(tiny.folder, tiny.folder / "cache"),
            key=KEY,
            tasks=["generate"],
            max_tokens=128,
            options=options,
        )
    )
    yield runtime
    runtime.unload(KEY)


def ended(runtime, name):
    """How a text ends."""
    found = queue.Queue(1000)
    runtime.start(KEY, case(name), found.put)
    while isinstance(what := found.get(timeout=20), Piece):
        pass
    return what


@pytest.mark.parametrize("name", WRITTEN)
def test_sglang_text_ends_whatever_the_server_says(served, lost, name):
    """What cannot be read, or breaks off, fails that text alone: its slot is free again."""
    for _ in range(OPTIONS["slots"] + 1):
        error = ended(served, name)
        assert type(error).code == RunFailed.code
    assert isinstance(ended(served, "plain"), Generated)
    assert not lost.is_set()


def test_sglang_slot_is_free_when_the_end_is_told(served):
    """Who is told of an end may begin the next text at once, with all other slots taken."""
    for _ in range(OPTIONS["slots"] - 1):
        served.start(KEY, case("long"), lambda _: None)
    for _ in range(20):
        assert isinstance(ended(served, "plain"), Generated)
    served.stop("long")


def test_sglang_adapter_is_known_until_the_server_has_unloaded_it(served, adapter):
    """Where it refuses, the adapter still takes the room that it takes there."""
    served.load_adapter(KEY, AdapterSpec(STUCK, adapter))
    with pytest.raises(RunFailed):
        served.unload_adapter(KEY, STUCK)
    with pytest.raises(OutOfMemory):
        served.load_adapter(KEY, AdapterSpec(ADAPTER, adapter))


def vectors(encode, tiny, *items):
    """What becomes of items of an encoder whose server is `encode`."""
    model = spec(tiny.folder, tiny.folder / "cache", key=KEY, tasks=["encode"], pooling="last")
    return Embedder(model, tiny.folder, 100, encode).run(items).outcomes


def test_sglang_encoder_refuses_adapters_item_by_item(tiny):
    """An item with an adapter is not answered with the bare model's vectors; the others are."""
    asked = RunItem("0", "encode", [1], texts=["a"], adapter=ADAPTER)
    bare = RunItem("1", "encode", [1], texts=["a"])
    failed, result = vectors(lambda ids: [[1.0, 0.0]] * len(ids), tiny, asked, bare)
    assert isinstance(failed, ModelUnavailable)
    assert isinstance(result, Result)
    assert np.array_equal(array(result, "dense"), [[1.0, 0.0]])


def said(address, key, ask):
    """What a server answers to one question."""

    async def call():
        contract = Contract(address, key, work_s=0.05)
        try:
            return await ask(contract)
        finally:
            await contract.close()

    return asyncio.run(call())


@pytest.fixture
def silent():
    """The address of a server that takes every connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_sglang_silence_is_told_of_each_item_once(silent, tiny):
    """It is a kind of its own; a batch is asked for once, and not again in halves."""
    calls = []

    def encode(ids):
        calls.append(len(ids))
        return said(silent, "key", lambda contract: contract.encode(ids))

    items = [RunItem(str(at), "encode", [1], texts=["a"]) for at in range(4)]
    outcomes = vectors(encode, tiny, *items)
    assert [type(one) for one in outcomes] == [DeadlineExceeded] * len(items)
    assert calls == [len(items)]


def started(tiny, module=REPLAY, *more):
    """A server of its own, and its address."""
    port = free_port()
    arguments = ["--model-path", str(tiny.folder), "--port", str(port), *more]
    return Server(KEY, arguments, {}, lambda: None, module), f"http://127.0.0.1:{port}"


def test_sglang_server_is_ours_and_its_key_is_nobody_elses(tiny):
    """Another's server is none that is ready; the key is on no command line and in no file left."""
    server, address = started(tiny)
    try:
        assert stat.S_IMODE(server.folder.stat().st_mode) == 0o700
        own = str(tiny.folder)
        server.wait_ready(lambda: said(address, server.key, lambda ours: ours.ready(own)))
        family = psutil.Process().children(recursive=True)
        assert any(REPLAY in one.cmdline() for one in family)
        assert not any(server.key in part for one in family for part in one.cmdline())
        assert list(server.folder.iterdir()) == []
        assert said(address, "another", lambda theirs: theirs.ready(own)) is None
        assert said(address, server.key, lambda ours: ours.ready("/elsewhere")) is None
    finally:
        server.stop()
    assert not server.folder.exists()


def test_sglang_server_that_left_is_not_ready_whoever_answers(tiny):
    """Its process is looked at before an answer counts; however much it said, the end is kept."""
    server, _ = started(tiny, TALKING)
    assert server.lost.wait(20)
    with pytest.raises(ModelUnavailable, match=rf"left with status 3.*line {LINES - 1}$"):
        server.wait_ready(lambda: "another's answer")
    server.stop()


def test_sglang_connection_is_used_once():
    """A server may close a connection after any answer: the next call does not fail of that."""

    class Once(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
            self.rfile.read(int(self.headers["Content-Length"]))
            self.connection.recv(1)  # the next request, or its end
            self.close_connection = True

    async def twice(contract):
        await contract.abort("one")
        await contract.abort("two")

    with ThreadingHTTPServer(("127.0.0.1", 0), Once) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        said(f"http://127.0.0.1:{server.server_port}", "key", twice)
        server.shutdown()


@pytest.mark.parametrize(
    ("more", "kind"),
    [([], OutOfMemory), (["--says", "Traceback (most recent call last):"], ModelUnavailable)],
)
def test_sglang_server_that_kills_itself_is_not_out_of_memory(tiny, more, kind):
    """Killed from outside, it lacked memory; what it says of a fault of its own is the reason."""
    server, _ = started(tiny, TALKING, *more, "--killed")
    with pytest.raises(kind, match=more[1][:9] if more else "killed while it loaded"):
        server.wait_ready(lambda: None)
    server.stop()


def test_sglang_damaged_weights_are_refused_before_a_server_starts(tiny, tmp_path):
    """A file that is cut short is named."""
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    runtime = SglangRuntime(device="cpu", threads=1, module=REPLAY)
    model = spec(folder, tmp_path, key=KEY, tasks=["generate"], max_tokens=128, options=OPTIONS)
    with pytest.raises(ModelUnavailable, match=r"model\.safetensors is cut short"):
        runtime.load(model)


def test_sglang_unpacked_models_are_bounded(tmp_path):
    """The few used last are kept, and what a killed process left half done goes as well."""
    made = [tmp_path / f"{'half-' if at == 0 else ''}{at}" for at in range(MAX_UNPACKED + 2)]
    for used_s, folder in enumerate(made):
        folder.mkdir()
        (folder / "model.safetensors").touch()
        os.utime(folder, (used_s, used_s))
    keep_last(made[1])
    assert made[1].is_dir()
    assert not made[0].exists()
    assert len(list(tmp_path.iterdir())) == MAX_UNPACKED
