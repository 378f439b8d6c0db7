"""The runtime `sglang` against a server that answers as a recorded one: its contract, and its end.

`test_runtime_sglang_server.py` has the claims that need the real server.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file, save_file

from shoal.errors import (
    CapacityError,
    InputTooLong,
    InvalidRequest,
    ModelUnavailable,
    OutOfMemory,
    RunFailed,
    RuntimeCrashed,
    ShoalError,
)
from shoal.ipc.messages import AdapterSpec
from shoal.runtimes.interface import Capacity
from shoal.runtimes.sglang import adapters, command
from shoal.runtimes.sglang.contract import refused
from shoal.runtimes.sglang.runtime import SglangRuntime
from shoal.wire.generation import Generated, Piece
from tests.support.candle_texts import Tiny
from tests.support.pace import limit_s
from tests.support.runtime_models import spec
from tests.support.sglang_cases import ADAPTER, CASES, KEY, OPTIONS, case

pytestmark = pytest.mark.slow

REPLAY = "tests.support.sglang_replay"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def adapter(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    tiny.adapter(folder, 1)
    return AdapterSpec(ADAPTER, str(folder))


def model(tiny, **fields):
    given = {"key": KEY, "tasks": ["generate"], "max_tokens": 128, "options": OPTIONS}
    return spec(tiny.folder, tiny.folder / "cache", **(given | fields))


class Lost:
    """A runtime on a replayed server; `lost` is set where it would leave."""

    def __init__(self) -> None:
        self.lost = threading.Event()
        self.runtime = SglangRuntime(device="cpu", threads=1, on_lost=self.lost.set, module=REPLAY)


@pytest.fixture(scope="module")
def served(tiny, adapter):
    """A model with an adapter, loaded once for the tests that leave it as it is."""
    held = Lost()
    held.runtime.load(model(tiny))
    held.runtime.load_adapter(KEY, adapter)
    yield held.runtime
    held.runtime.unload(KEY)
    assert not held.lost.is_set()


def said(runtime, name, **more):
    """The pieces of a case, and its end."""
    found: queue.Queue[Piece | Generated | ShoalError] = queue.Queue(1000)
    runtime.start(KEY, case(name, **more), found.put)
    pieces = []
    while isinstance(what := found.get(timeout=limit_s(20)), Piece):
        pieces.append(what)
        if len(pieces) == CASES[name].stop_after:
            runtime.stop(name)
    return pieces, what


def test_sglang_capacity_and_memory_are_the_servers(served):
    """Slots and tokens are those of `/server_info`; memory is that of the server's processes."""
    assert served.capacity(KEY) == Capacity(OPTIONS["slots"], OPTIONS["kv_tokens"])
    assert served.memory()[KEY] > 0


@pytest.mark.parametrize("name", ["plain", "chat", "likely", "schema", "adapted"])
def test_sglang_pieces_make_the_whole(served, name):
    """The pieces end to end are the text of the whole; so are their tokens and probabilities."""
    pieces, whole = said(served, name)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert sum(piece.tokens for piece in pieces) == whole.tokens == CASES[name].how["max_tokens"]
    assert [one for piece in pieces for one in piece.logprobs] == whole.logprobs
    assert len(whole.logprobs) == (whole.tokens if "logprobs" in CASES[name].how else 0)
    assert all(len(one.top) == CASES[name].how["logprobs"] for one in whole.logprobs)
    assert whole.finish_reason == "length"


def test_sglang_without_stream_sends_the_same_whole_at_once(served):
    """A request that is not streamed gets no pieces, and the same text."""
    (_, streamed), (pieces, whole) = said(served, "plain"), said(served, "plain", stream=False)
    assert not pieces
    assert (whole.text, whole.tokens) == (streamed.text, streamed.tokens)


def test_sglang_prompt_is_the_models_own_template(served, tiny):
    """A conversation is as long as transformers makes it, and an adapter changes the text."""
    turns = [{"role": "user", "content": CASES["chat"].prompt}]
    ids = tiny.tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    assert said(served, "chat")[1].prompt_tokens == len(ids)
    assert said(served, "adapted")[1].text != said(served, "plain")[1].text


def test_sglang_stop_text_over_several_pieces_is_in_none(served):
    """What comes before a stop text is the answer; no piece has a letter of it."""
    whole = said(served, "plain")[1].text
    pieces, stopped = said(served, "stop")
    (stop,) = CASES["stop"].how["stop"]
    assert stopped.text == whole.partition(stop)[0] != whole
    assert "".join(piece.text for piece in pieces) == stopped.text
    assert stopped.finish_reason == "stop"


def test_sglang_stopped_text_ends_at_once_and_frees_its_slot(served):
    """It ends as cancelled with what it had, the server is told, and all slots are free again."""
    pieces, whole = said(served, "long")
    assert whole.finish_reason == "cancelled"
    assert whole.text == "".join(piece.text for piece in pieces)
    began = [queue.Queue(1000) for _ in range(OPTIONS["slots"] + 1)]
    for found in began[:-1]:
        served.start(KEY, case("long"), found.put)
    with pytest.raises(CapacityError):
        served.start(KEY, case("long"), began[-1].put)
    for _ in began[:-1]:
        served.stop("long")
    assert said(served, "plain")[1].finish_reason == "length"


def test_sglang_refusals_are_the_callers_and_name_the_field(served):
    """What the server says in the middle of a stream, and what it never sees."""
    for name, param in (("whale", "schema"), ("cold", None)):
        pieces, error = said(served, name)
        assert not pieces
        assert isinstance(error, InvalidRequest)
        assert error.param == param
    for more, param in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 1, "temperature": None}, "seed"),
    ):
        with pytest.raises(InvalidRequest) as told:
            said(served, "plain", **more)
        assert told.value.param == param
    long = case("plain")
    long = type(long)(long.item, long.task, [1], texts=["a" * 200], params=long.params)
    with pytest.raises(InputTooLong, match=r"has 201 tokens.*takes prompts of \d+"):
        served.start(KEY, long, print)


def test_sglang_greedy_text_takes_any_seed(served):
    """Where chance has no part, a seed changes nothing and is not refused."""
    assert said(served, "plain", seed=7)[1].text == said(served, "plain")[1].text


def test_sglang_server_that_dies_takes_the_runtime_along(tiny):
    """The text fails as that of a crashed runtime, and the process would leave at once."""
    held = Lost()
    held.runtime.load(model(tiny))
    pieces, error = said(held.runtime, "dies")
    assert len(pieces) <= CASES["dies"].dies_after
    assert isinstance(error, RuntimeCrashed)
    assert held.lost.wait(10)
    held.runtime.unload(KEY)


def test_sglang_unload_ends_texts_and_leaves_no_process(tiny):
    """A text that grows is cancelled; the server and what it started are gone."""
    held = Lost()
    before = set(psutil.Process().children(recursive=True))
    held.runtime.load(model(tiny))
    family = set(psutil.Process().children(recursive=True)) - before
    assert family
    found = queue.Queue(1000)
    held.runtime.start(KEY, case("long"), found.put)
    held.runtime.unload(KEY)
    assert not psutil.wait_procs(family, 5)[1]
    told = [found.get_nowait() for _ in range(found.qsize())]
    assert [what.finish_reason for what in told if isinstance(what, Generated)] == ["cancelled"]
    assert not held.lost.is_set()
    with pytest.raises(ModelUnavailable):
        held.runtime.start(KEY, case("plain"), print)


HOST = """
import time
from shoal.runtimes.sglang.server import Server
print(Server("m@1", [], {}, print, "tests.support.forking_server").folder, flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("killed", ["host", "server"])
def test_sglang_nothing_outlives_a_killed_process(killed):
    """Neither the server, nor a child that is not tied to it, nor its files, whoever is killed."""
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    folder = Path(host.stdout.readline().strip())
    assert folder.is_dir()
    family: list[psutil.Process] = []
    give_up_s = time.monotonic() + limit_s(20)
    while len(family) < 3 and time.monotonic() < give_up_s:  # keeper, server and its child
        family = psutil.Process(host.pid).children(recursive=True)
        time.sleep(0.02)
    assert len(family) == 3
    (host if killed == "host" else family[1]).kill()
    assert not psutil.wait_procs(family, 10)[1]
    assert not folder.exists()
    host.kill()
    host.communicate()


def test_sglang_server_that_does_not_start_says_why(tiny):
    """The end of its log is the reason, and nothing of it stays."""
    runtime = SglangRuntime(device="cpu", threads=1, module="tests.support.nothing")
    with pytest.raises(ModelUnavailable, match=r"left with status 1.*tests\.support\.nothing"):
        runtime.load(model(tiny))
    assert runtime.memory() == {}


@pytest.mark.parametrize(
    ("changes", "left_out", "what"),
    [
        ({"use_rslora": True}, "", "use_rslora"),
        ({"use_dora": True}, "", "use_dora"),
        ({"r": 16, "lora_alpha": 8}, "", "says rank 16"),
        ({}, "lora_B", "half a pair"),
    ],
)
def test_sglang_adapter_that_would_be_served_wrongly_is_refused(
    served, adapter, tmp_path, *, changes, left_out, what
):
    """What SGLang passes over, or dies of, is found before it sees the adapter."""
    read = load_file(f"{adapter.path}/adapter_model.safetensors")
    kept = {name: values for name, values in read.items() if not left_out or left_out not in name}
    save_file(kept, tmp_path / "adapter_model.safetensors")
    config = json.loads((Path(adapter.path) / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelUnavailable, match=what):
        served.load_adapter(KEY, AdapterSpec("tiny@bad@1", str(tmp_path)))
    assert said(served, "adapted")[1].finish_reason == "length"


def test_sglang_adapter_of_another_model_is_refused(adapter, tmp_path):
    """Other shapes, other names and a larger rank than there is room for are told apart."""
    wider = Tiny(tmp_path / "wider", width=32)
    with pytest.raises(ModelUnavailable, match="another's"):
        adapters.check(adapter, adapters.shapes_of(wider.folder), 8)
    with pytest.raises(ModelUnavailable, match="the model has no"):
        adapters.check(adapter, {}, 8)
    own = Tiny(tmp_path / "own")
    with pytest.raises(ModelUnavailable, match="adapter_rank"):
        adapters.check(adapter, adapters.shapes_of(own.folder), 2)


def test_sglang_adapters_are_bounded_and_go_when_told(tiny, adapter):
    """One more than there is room for is out of memory; after an unload there is room again."""
    held = Lost()
    with pytest.raises(ModelUnavailable, match="not loaded"):
        held.runtime.load_adapter(KEY, adapter)
    held.runtime.load(model(tiny, options=OPTIONS | {"max_adapters": 1}))
    assert held.runtime.load_adapter(KEY, adapter) > 0
    with pytest.raises(OutOfMemory, match="room for"):
        held.runtime.load_adapter(KEY, AdapterSpec("tiny@more@1", adapter.path))
    held.runtime.unload_adapter(KEY, ADAPTER)
    with pytest.raises(ModelUnavailable, match="not loaded"):
        said(held.runtime, "adapted")
    assert held.runtime.load_adapter(KEY, adapter) > 0
    held.runtime.unload(KEY)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"options": {"slots": command.MAX_SLOTS + 1}}, "slots"),
        ({"options": {"max_adapters": command.MAX_ADAPTERS + 1}}, "max_adapters"),
        ({"options": {"adapter_rank": command.MAX_RANK + 1}}, "adapter_rank"),
        ({"options": {"kv_tokens": 128}}, "kv_tokens"),
        ({"options": {"dtype": "int3"}}, "int3"),
        ({"options": {"seeds": True}}, "seeds on a CPU"),
        ({"options": {"speed": 3}}, "no option 'speed'"),
        ({"tasks": ["encode"], "options": {}, "pooling": "mean"}, "pools llama models by last"),
        ({"tasks": ["encode", "score"], "options": {}}, "generate or encode"),
        ({"tasks": ["encode"], "pooling": "last"}, "leave out max_adapters"),
        ({"weights": "pytorch_model.bin"}, "pytorch_model.bin"),
    ],
)
def test_sglang_model_that_it_cannot_serve_does_not_load(tiny, fields, what):
    """What would be wrong, or without a bound, is said by name before a server starts."""
    with pytest.raises(ModelUnavailable, match=what):
        Lost().runtime.load(model(tiny, **fields))


def test_sglang_command_on_a_gpu_is_plain(tiny):
    """No CPU engine, kernels of its own choice, the model's own dtype, seeds where asked for."""
    on_gpu = model(tiny, options={"seeds": True})
    made = command.plan(on_gpu, "cuda:1")
    arguments = command.arguments(on_gpu, tiny.folder, {}, made, 1)
    assert not {"--attention-backend", "--lora-backend", "--disable-cuda-graph"} & set(arguments)
    assert "--enable-deterministic-inference" in arguments
    assert arguments[arguments.index("--base-gpu-id") + 1] == "1"
    assert made.dtype == "auto"
    assert "SGLANG_USE_CPU_ENGINE" not in command.environment("cuda:1")
    assert command.environment("cpu")["SGLANG_USE_CPU_ENGINE"] == "1"


def test_sglang_error_bodies_become_typed_errors():
    """Bodies as the server writes them: the caller's for 4xx, its own for the rest."""
    body = b'{"error":{"message":"LoRA adapter \'nope\' was requested"}}'
    assert isinstance(refused(400, body), InvalidRequest)
    assert "nope" in refused(400, body).message
    body = b'{"success":false,"error_message":"LoRA is not enabled.","loaded_adapters":null}'
    assert "not enabled" in refused(400, body).message
    assert refused(503, b"<html>").http_status >= 500
    assert isinstance(refused(422, b"{}"), InvalidRequest)
    assert isinstance(refused(401, b'{"error":"Unauthorized"}'), RunFailed)  # the key is ours
