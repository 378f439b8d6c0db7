"""Adapters of a running `shoal serve`, as engineers add them and many tenants use them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket

import httpx
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from shoal.catalog.change import difference
from shoal.catalog.schema import Adapter
from shoal.catalog.seed import write
from shoal.cli.access import read_access
from shoal.cli.main import app
from shoal.clock import monotonic
from shoal.errors import ShoalError
from shoal.queue.interface import QueueLimits
from shoal.queue.jetstream import JetStreamQueue
from shoal.queue.topology import Topology
from shoal.runtimes.null import numbers
from shoal.runtimes.null_texts import word
from tests.conftest import run
from tests.support.lora import MODULE, write_adapter
from tests.support.pace import limit_s
from tests.support.shoal_process import NULL_ENTRY, Serve

pytestmark = pytest.mark.slow

DIM = 8
MOST = 8
PATIENCE_S = 10.0


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """A server whose object store takes connections and never says a word."""
    silent = socket.create_server(("127.0.0.1", 0))
    folder = tmp_path_factory.mktemp("lora")
    sized = NULL_ENTRY.format(id="sized", options="{}")
    save_file({f"{MODULE}.weight": np.zeros((8, 8), np.float32)}, folder / "model.safetensors")
    base = NULL_ENTRY.format(id="base", options=f"{{max_adapters: {MOST}}}")
    (folder / "catalog").mkdir()
    (folder / "catalog" / "base.yaml").write_text(f"{base}aliases: [alias]\n")
    sized = sized.replace("file:///", f"file://{folder}")
    (folder / "catalog" / "sized.yaml").write_text(sized)
    other = base.replace("id: base", "id: texts").replace('runtime: "null"', "runtime: onnx")
    (folder / "catalog" / "texts.yaml").write_text(other)
    kept = {"base": "base", "name": "kept", "source": f"file://{write_adapter(folder / 'kept')}"}
    (folder / "catalog" / "kept.yaml").write_text(yaml.safe_dump(kept))
    server = Serve(
        folder,
        *("--devices", "cpu:1"),
        generators={"writer": "{tokens: 6, max_adapters: 2}"},
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{silent.getsockname()[1]}",
        AWS_ALLOW_HTTP="true",
        AWS_REGION="us-east-1",
        AWS_ACCESS_KEY_ID="key",
        AWS_SECRET_ACCESS_KEY="secret",  # noqa: S106 - a store that is none
    )
    yield server
    silent.close()
    assert server.leave() == 0, server.output


@pytest.fixture
def lora(serve):
    """The command on the served folder; its exit code and what it printed, errors included."""

    def call(*words: object) -> tuple[int, str]:
        where = ["--data-dir", str(serve.folder / "data")]
        result = CliRunner().invoke(app, ["lora", *map(str, words), *where])
        if isinstance(result.exception, ShoalError):
            return 2, result.exception.message
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        return result.exit_code, result.output

    return call


def _listed(lora) -> dict[str, dict]:
    code, output = lora("list", "--json")
    assert code == 0, output
    return {row["adapter"]: row for row in json.loads(output)["adapters"]}


def _encode(server, model, text="a text", **headers):
    return server.post("/v1/encode", {"model": model, "inputs": [text]}, **headers)


def _vector(answer):
    assert answer.status_code == 200, answer.text
    return np.array(answer.json()["dense"][0], np.float32)


def _expected(key, text="a text"):
    return numbers([f"{key}|{text}"], DIM)[0]


def _soon(server, model, status):
    """The answer once it has the status."""
    give_up = monotonic() + limit_s(PATIENCE_S)
    while (answer := _encode(server, model)).status_code != status:
        assert monotonic() < give_up, answer.text
    return answer


def _write(server, adapters):
    """Writes adapters down as `shoal lora add` does, without looking at their files."""

    async def main():
        topology = Topology("beside", "file", 1, QueueLimits(), ("interactive",))
        address = read_access(server.folder / "data")
        queue = await JetStreamQueue.open(address, topology, name="test")
        await write(queue.catalog, difference(adapters, []), "command")
        await queue.close()

    run(main(), 60)


def test_lora_added_adapter_is_served_fresh_and_gone_when_removed(serve, lora, tmp_path):
    """It answers under each of its names; published anew its answers are new.

    A removed one is a 404 that names what there is.
    """
    assert _encode(serve, "base@tone").status_code == 404
    folder = write_adapter(tmp_path / "tone", seed=1)
    code, output = lora("add", "base@tone", "--source", folder, "--description", "A tone.")
    assert code == 0, output
    answers = [_soon(serve, "base@tone", 200)]
    answers += [_encode(serve, name) for name in ("alias@tone", "base@1@tone", "alias@1@tone")]
    first = next(key for key in _listed(lora) if key.startswith("base@tone@"))
    for answer in answers:
        np.testing.assert_array_equal(_vector(answer), _expected(first))
        assert answer.json()["model"] == "base@tone"
    bare = numbers(["a text"], DIM)[0]
    np.testing.assert_array_equal(_vector(_encode(serve, "base")), bare)
    np.testing.assert_array_equal(_vector(_encode(serve, "base@1")), bare)

    write_adapter(folder, seed=2)
    assert lora("add", "alias@tone", "--source", folder)[0] == 0
    give_up = monotonic() + limit_s(PATIENCE_S)
    while (fresh := _vector(_encode(serve, "base@tone")) == _expected(first)).all():
        assert monotonic() < give_up
    assert not fresh.any()
    second = next(k for k, row in _listed(lora).items() if row["entry"] and "@tone@" in k)
    np.testing.assert_array_equal(_vector(_encode(serve, "base@tone")), _expected(second))
    card = httpx.get(f"{serve.url}/v1/models/base@tone").json()
    assert card["description"] == "A tone."
    assert f"= {second}" in lora("add", "base@tone", "--source", folder)[1]

    where = ["--data-dir", str(serve.folder / "data")]
    shown = CliRunner().invoke(app, ["models", "show", "alias@tone", *where]).output
    assert "description: A tone." in shown
    assert f"revision {second.rpartition('@')[2]}, by a command" in shown
    assert "base@1  resident on cpu#0" in shown
    kept = CliRunner().invoke(app, ["models", "remove", "base", *where])
    assert kept.exit_code == 1
    assert re.search(r"model `base` still has \d+ adapters", kept.output)

    assert lora("remove", "base@tone")[0] == 0
    message = _soon(serve, "base@kep", 404).json()["message"]
    assert message == "model `base` has no revision or adapter `kep`, did you mean `kept`?"
    _soon(serve, "base@tone", 404)
    assert lora("remove", "base@tone") == (0, "base@tone: is not there any more\nnothing to do\n")


def test_lora_adapters_are_cards_among_the_models(serve):
    """An adapter that came with the folder is a model with a parent, listed and by its name."""
    cards = {card["id"]: card for card in httpx.get(f"{serve.url}/v1/models").json()["data"]}
    assert cards["base"]["parent"] is None
    assert cards["base@kept"]["parent"] == "base"
    assert cards["base@kept"]["endpoints"] == cards["base"]["endpoints"]
    _vector(_encode(serve, "base@kept"))
    one = httpx.get(f"{serve.url}/v1/models/base@kept").json()
    assert one["id"] == "base@kept"
    assert httpx.get(f"{serve.url}/v1/models/base@none").status_code == 404


def _without_b(folder):
    file = folder / "adapter_model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if "lora_A" in n}, file)


def _without_rank(folder):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 0}))


@pytest.mark.parametrize(
    ("name", "spoil", "more", "said"),
    [
        ("base@bad", _without_b, (), f"{MODULE} is half a pair: it has no lora_B"),
        ("base@bad", _without_rank, (), "is 0, no whole number from 1 on"),
        (
            "base@bad",
            lambda folder: (folder / "adapter_config.json").unlink(),
            (),
            "half an adapter: there is no adapter_config.json",
        ),
        ("sized@bad", None, (), "is [8, 8]: the adapter is of another base"),
        ("bass@bad", None, (), "no model `bass`, did you mean `base`?"),
        ("base", None, (), "`base`: an adapter is named BASE@NAME"),
        ("base@a b", None, (), "name: "),
        ("base@1", None, (), "that is the name of revision `1` of `base`"),
        ("texts@bad", None, (), "runs on onnx, which takes no adapters"),
        (
            "base@bad",
            None,
            ("--digest", f"adapter_config.json={'0' * 64}"),
            "adapter_config.json is another file",
        ),
        ("base@bad", None, ("--digest", f"x.json={'0' * 64}"), "`x.json` is none of adapter_co"),
    ],
)
def test_lora_add_refuses_what_is_no_adapter_of_the_model(  # noqa: PLR0917
    lora, tmp_path, name, spoil, more, said
):
    """What can be seen to be wrong from here is refused with its cause."""
    folder = write_adapter(tmp_path / "bad")
    if spoil:
        spoil(folder)
    code, output = lora("add", name, "--source", folder, *more)
    assert code != 0
    assert said in output
    assert f"+ {name}" not in output


def test_lora_thousand_registered_and_a_few_resident_answer_apart(serve, lora):
    """Tenants that use a thousand adapters at once, some far more than others, get their own.

    No request fails, no answer is another adapter's, and no copy has more than it may.
    """
    folder = f"file://{serve.folder / 'kept'}"
    many = [Adapter(name=f"t{n:04}", base="base", source=folder) for n in range(1000)]
    _write(serve, many)
    rng = random.Random(7)
    shares = [1 / (n + 1) for n in range(len(many))]
    chosen = rng.choices(many, shares, k=400)
    assert len({adapter.key for adapter in chosen}) > 20 * MOST
    residents = []

    async def main():
        async with httpx.AsyncClient(base_url=serve.url, timeout=limit_s(60)) as client:
            left = iter(enumerate(chosen))

            async def ask():
                for at, adapter in left:
                    body = {"model": adapter.id, "inputs": [f"text {at}"]}
                    tenant = {"X-Shoal-Tenant": adapter.name}
                    answer = await client.post("/v1/encode", json=body, headers=tenant)
                    expected = _expected(adapter.key, f"text {at}")
                    np.testing.assert_array_equal(_vector(answer), expected)

            async def watch():
                while True:
                    cards = (await client.get("/v1/models")).json()["data"]
                    states = [card["state"] for card in cards if card["parent"] == "base"]
                    residents.append(states.count("resident"))
                    await asyncio.sleep(0.2)

            watching = asyncio.create_task(watch())
            await asyncio.gather(*(ask() for _ in range(24)))
            watching.cancel()

    _soon(serve, many[-1].id, 200)
    run(main(), 120)
    assert 0 < max(residents) <= MOST
    places = [row["places"] for key, row in _listed(lora).items() if key.startswith("base@")]
    assert 0 < sum(map(len, places)) <= MOST


def test_lora_texts_of_many_adapters_grow_beside_one_another(serve):
    """Of more adapters than a generator has at once each text is its own adapter's."""
    folder = f"file://{serve.folder / 'kept'}"
    voices = [Adapter(name=f"voice{n}", base="writer", source=folder) for n in range(5)]
    _write(serve, voices)

    async def main():
        async with httpx.AsyncClient(base_url=serve.url, timeout=limit_s(60)) as client:
            chosen = [*voices, None] * 3
            names = [voice.id if voice else "writer" for voice in chosen]
            bodies = [{"model": name, "inputs": "once upon a time"} for name in names]
            answers = await asyncio.gather(*(client.post("/v1/generate", json=b) for b in bodies))
        for voice, answer in zip(chosen, answers, strict=True):
            assert answer.status_code == 200, answer.text
            key = voice.key if voice else ""
            words = [word("once upon a time", at, None, key) for at in range(6)]
            assert answer.json()["data"][0]["text"] == "".join(words)
            assert answer.json()["model"] == (voice.id if voice else "writer")

    give_up = monotonic() + limit_s(PATIENCE_S)
    while httpx.get(f"{serve.url}/v1/models/{voices[-1].id}").status_code != 200:
        assert monotonic() < give_up
    run(main(), 60)


def test_lora_broken_adapter_fails_alone(serve):
    """One that its runtime refuses is a clear 503; requests beside it are answered as ever."""
    broken = write_adapter(serve.folder / "broken")
    _write(serve, [Adapter(name="bad", base="base", source=f"file://{broken}")])
    _soon(serve, "base@bad", 503)

    async def main():
        async with httpx.AsyncClient(base_url=serve.url, timeout=limit_s(60)) as client:
            names = ["base", "base@bad", "base@kept"] * 10
            bodies = [{"model": name, "inputs": ["a text"]} for name in names]
            answers = await asyncio.gather(*(client.post("/v1/encode", json=b) for b in bodies))
        for name, answer in zip(names, answers, strict=True):
            assert answer.status_code == (503 if name == "base@bad" else 200), answer.text
            if name == "base@bad":
                assert "base@bad@1 is no adapter" in answer.json()["message"]

    run(main(), 60)


def test_lora_slow_fetch_holds_up_nobody_else(serve):
    """More items than a line may hold wait for a store that says nothing; the others pass.

    They end at their deadline.
    """
    slow = Adapter(name="slow", base="base", source="s3://bucket/slow")
    _write(serve, [slow])
    give_up = monotonic() + limit_s(PATIENCE_S)
    while httpx.get(f"{serve.url}/v1/models/base@slow").status_code != 200:
        assert monotonic() < give_up

    async def main():
        async with httpx.AsyncClient(base_url=serve.url, timeout=limit_s(60)) as client:
            deadline = {"X-Shoal-Deadline-Ms": "4000"}
            body = {"model": "base@slow", "inputs": ["a text"]}
            waiting = [
                asyncio.create_task(client.post("/v1/encode", json=body, headers=deadline))
                for _ in range(90)
            ]
            for at in range(20):
                answer = await client.post(
                    "/v1/encode", json={"model": "base@kept", "inputs": [f"text {at}"]}
                )
                np.testing.assert_array_equal(
                    _vector(answer), _expected("base@kept@1", f"text {at}")
                )
            assert not any(task.done() for task in waiting)
            assert {(await task).status_code for task in waiting} == {504}

    run(main(), 60)


def test_lora_adapters_come_back_after_their_process_was_lost(serve):
    """A copy that was lost with its process has no adapters, and they are loaded anew."""
    _vector(_encode(serve, "base@kept"))
    for process in serve.children("shoal.runtimes.host"):
        process.kill()
    np.testing.assert_array_equal(_vector(_encode(serve, "base@kept")), _expected("base@kept@1"))
