"""The runtime `sglang` with the real server in its bundle: what it says is what transformers says.

The bundle takes minutes to build, so these run where it is built: `make check-engines` does both.
Elsewhere they skip with that reason.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import psutil
import pytest

from shoal.bundles.definition import read
from shoal.bundles.shelf import Shelf
from shoal.errors import RuntimeCrashed
from shoal.ipc.messages import AdapterSpec, RunItem
from shoal.wire.envelope import Params, Result
from shoal.wire.generation import ChatMessage, Generation
from tests.conftest import run
from tests.support.bundle_builds import started
from tests.support.candle_texts import Tiny
from tests.support.runtime_models import (
    MINILM,
    array,
    cosines,
    ids_of,
    package_path,
    reference_hidden,
    spec,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ENGINES = Path(__file__).resolve().parent.parent.parent / ".shoal" / "engines"
KEY = "tiny@1"
TOKENS = 24


@pytest.fixture(scope="module")
def shelf():
    """The bundles of `make check-engines`."""
    found = Shelf(ENGINES / "bundles", read(), may_build=False)
    if not found.is_built(found.named("sglang")):
        message = "the bundle sglang is not built: make check-engines"
        if "CHECK_ENGINES" in os.environ:
            pytest.fail(message)
        pytest.skip(message)
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Tiny(tmp_path_factory.mktemp("tiny"))


def item(name: str, prompt: str, adapter: str = "", *, chat: bool = False, **how) -> RunItem:
    params = Params(generation=Generation(**({"temperature": 0.0, "max_tokens": TOKENS} | how)))
    said = {"chat": [ChatMessage("user", prompt)]} if chat else {"texts": [prompt]}
    return RunItem(name, "generate", [1], params=params, adapter=adapter, **said)


def prompt_ids(tiny: Tiny, prompt: str, *, chat: bool = False) -> list[int]:
    if not chat:
        return tiny.tokenizer(prompt)["input_ids"]
    turns = [{"role": "user", "content": prompt}]
    return tiny.tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]


@pytest.fixture
def model(tiny, tmp_path):
    return spec(
        *(tiny.folder, tmp_path),
        key=KEY,
        tasks=["generate"],
        max_tokens=256,
        options={"slots": 8, "max_adapters": 2, "adapter_rank": 8},
    )


def test_sglang_server_keeps_the_contract(shelf, tiny, model, tmp_path):
    """Greedy texts are transformers', with adapters PEFT's, all at once in one batch.

    A text that is stopped leaves the others as they are; when the server is killed in the middle of
    a text, its runtime process ends as well and the call says so.
    """
    keys = ["", "tiny@one@1", "tiny@two@1"]
    folders = [tmp_path / str(seed) for seed in (1, 2)]
    networks = [tiny.network(), *(tiny.adapter(path, at) for at, path in enumerate(folders))]
    prompts = [("a shoal of fish", False), ("hello", True)]
    expected = {
        (at, prompt): tiny.greedy(network, prompt_ids(tiny, prompt, chat=chat), TOKENS)
        for at, network in enumerate(networks)
        for prompt, chat in prompts
    }

    async def main():
        async with started(shelf, shelf.named("sglang"), "sglang") as (process, connection):
            loaded = await connection.load(model)
            assert (loaded.slots, loaded.kv_tokens) == (8, 1024)
            for key, path in zip(keys[1:], folders, strict=True):
                await connection.load_adapter(KEY, AdapterSpec(key, str(path)))
            endless = asyncio.create_task(
                connection.generate(KEY, item("endless", "endless", max_tokens=None))
            )
            asked = list(expected)
            texts = await asyncio.gather(
                *(
                    connection.generate(
                        KEY, item(f"{n}", prompt, keys[at], chat=dict(prompts)[prompt])
                    )
                    for n, (at, prompt) in enumerate(asked)
                )
            )
            endless.cancel()
            assert {key: one.text for key, one in zip(asked, texts, strict=True)} == expected
            again = await connection.generate(KEY, item("again", prompts[0][0]))
            assert again.text == expected[0, prompts[0][0]]
            await killed(process, connection)

    async def killed(process, connection):
        family = psutil.Process(process.pid).children(recursive=True)
        growing = asyncio.create_task(
            connection.generate(KEY, item("lost", "lost", max_tokens=None))
        )
        await asyncio.sleep(0.2)
        next(one for one in family if "shoal.ipc.guard" in one.cmdline()).kill()
        with pytest.raises(RuntimeCrashed):
            await growing
        assert psutil.wait_procs(family, 20)[1] == []

    run(main(), timeout_s=280)


def test_sglang_server_that_still_loads_goes_with_its_runtime_process(shelf, model):
    """When the runtime process is killed while the server starts others, none of them is left."""

    async def orphaned():
        async with started(shelf, shelf.named("sglang"), "sglang") as (process, connection):
            loading = asyncio.create_task(connection.load(model))
            family = []
            while len(family) < 5:  # the keeper, the server, and three that it starts
                family = psutil.Process(process.pid).children(recursive=True)
                await asyncio.sleep(0.05)
            await process.kill()
            with pytest.raises(RuntimeCrashed):
                await loading
            assert psutil.wait_procs(family, 20)[1] == []

    run(orphaned(), timeout_s=280)


def test_sglang_encoder_pools_the_first_token_as_the_reference(shelf, tmp_path):
    """Cosine >= 0.9999 with transformers, and equal texts give equal vectors: nothing is reused."""
    folder = package_path(MINILM)
    model = spec(folder, tmp_path, pooling="cls", max_tokens=256)
    texts = ["hello", "a shoal of fish", "hello", "word " * 100]
    found = []

    async def main():
        async with started(shelf, shelf.named("sglang"), "sglang") as (_, connection):
            await connection.load(model)
            items = [RunItem("all", "encode", [1] * len(texts), texts=texts)]
            found.append(await connection.run(model.key, items))

    run(main(), timeout_s=280)
    (done,) = found[0].items
    vectors = array(msgspec.msgpack.decode(done.result, type=Result), "dense")
    expected = [reference_hidden(folder, ids)[0] for ids in ids_of(folder, *texts)]
    assert cosines(vectors, expected).min() >= 0.9999
    assert cosines(vectors[:1], vectors[2:3]).min() >= 0.999999
