"""Part 2: LoRA adapters, several in one batch against a batch for each, and going to another one.

The adapters are of random weights: what they cost does not depend on what they say. Owns them, the
rounds and the rows. Does not own the extracted adapter (`extracted`).
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
from harness import Report, median
from measure.rounds import rotated, rounds
from msgspec.structs import replace
from safetensors.numpy import save_file

from runtime_cases.extracted import cosine_of_extracted
from runtime_cases.llama import LAYERS, WIDTH, write_llama
from runtime_cases.places import CACHE, running, why_not
from shoal.catalog.load import load
from shoal.catalog.resolve import tokenizer_path
from shoal.catalog.schema import Entry
from shoal.catalog.variants import on_runtime
from shoal.cli.samples import encode_item, make_item, sentences
from shoal.errors import RuntimeFault
from shoal.ipc.client import RuntimeConnection
from shoal.ipc.messages import AdapterSpec, RunItem, Traits
from shoal.wire.envelope import Inputs, Params
from shoal.wire.generation import Generation
from shoal.worker.tokenise import Tokeniser

ENCODER, ENCODER_WIDTH, ENCODER_LAYERS = "all-minilm-l6-v2", 384, 6
GENERATORS = ("candle", "sglang")
ADAPTERS, STREAM_ADAPTERS = 8, 4
TEXTS, TOKENS, RANK = 64, 24, 8
BUDGET_S = 60.0

Measure = Callable[[], Awaitable[float]]


@dataclass(slots=True)
class Found:
    """What was measured on one runtime. rates: tokens per second of each round, by the way."""

    load_s: list[float] = field(default_factory=list)
    unload_s: list[float] = field(default_factory=list)
    switch_s: list[float] = field(default_factory=list)
    stay_s: list[float] = field(default_factory=list)
    rates: dict[str, list[float]] = field(default_factory=dict)


def run(report: Report, *, quick: bool) -> None:
    """Part 2."""
    catalog = load(None)
    most = 2 if quick else 6
    with tempfile.TemporaryDirectory() as folder:
        if reason := why_not("torch"):
            print(f"left out: adapters on torch: {reason}", flush=True)
        else:
            entry = on_runtime(catalog.resolve(ENCODER), "torch")
            specs = _encoder_adapters(Path(folder), entry)
            report.add(**_row(entry, asyncio.run(_encoder(entry, specs, most))))
            report.headline["lora_cosine"] = asyncio.run(cosine_of_extracted(catalog))
        for runtime in GENERATORS:
            if reason := why_not(runtime):
                print(f"left out: adapters on {runtime}: {reason}", flush=True)
                continue
            entry = write_llama(Path(folder) / "llama", runtime)
            if runtime == "sglang":  # which makes room for adapters at its load
                room: dict[str, bool | int | float | str] = {"max_adapters": STREAM_ADAPTERS}
                entry = replace(entry, options=room | {"adapter_rank": RANK})
            specs = _generator_adapters(Path(folder), entry)
            try:
                found = asyncio.run(_generator(entry, specs, most))
            except RuntimeFault as error:
                print(f"left out: adapters on {runtime}: {error}", flush=True)
            else:
                report.add(**_row(entry, found))


def _row(entry: Entry, found: Found) -> dict[str, object]:
    rates = {way: median(each) for way, each in found.rates.items()}
    switch = {}
    if found.switch_s:
        switch = {"switch ms": 1e3 * (median(found.switch_s) - median(found.stay_s))}
    return {
        "2. model": entry.id,
        "runtime": entry.runtime,
        "load ms": 1e3 * median(found.load_s),
        "unload ms": 1e3 * median(found.unload_s),
        **switch,
        **{f"{way} tok/s": rate for way, rate in rates.items()},
        "mixed/separate": rates["mixed"] / rates["separate"],
        "mixed/bare": rates["mixed"] / rates["bare"],
    }


async def _encoder(entry: Entry, specs: Sequence[AdapterSpec], most: int) -> Found:
    """Batches of texts: each text with an adapter of its own, or a batch for each adapter."""
    found = Found()
    async with running(entry) as (connection, _, traits):
        await _load_all(connection, entry, specs, found)
        tokeniser = Tokeniser(tokenizer_path(entry, CACHE), entry.max_tokens)
        items = [encode_item(entry, traits, tokeniser, [text]) for text in sentences()[:TEXTS]]
        tokens = sum(sum(item.lengths) for item in items)
        mixed = [_with(item, specs[n % len(specs)].key) for n, item in enumerate(items)]
        groups = [mixed[n :: len(specs)] for n in range(len(specs))]

        async def rate(batches: Sequence[Sequence[RunItem]]) -> float:
            begun_s = time.monotonic()
            for batch in batches:
                for done in (await connection.run(entry.key, list(batch))).items:
                    if done.failure is not None:
                        raise done.failure.error()
            return tokens / (time.monotonic() - begun_s)

        ways: dict[str, Measure] = {
            "bare": lambda: rate([items]),
            "mixed": lambda: rate([mixed]),
            "separate": lambda: rate(groups),
        }
        await _in_turn(ways, most, found)
        for number in range(4 * most):
            for waits_s, key in ((found.switch_s, specs[number % 2].key), (found.stay_s, "")):
                again = key or specs[number % 2].key
                begun_s = time.monotonic()
                await connection.run(entry.key, [_with(items[0], again)])
                waits_s.append(time.monotonic() - begun_s)
        await _unload_all(connection, entry, specs, found)
    return found


async def _generator(entry: Entry, specs: Sequence[AdapterSpec], most: int) -> Found:
    """Texts that grow at once, each with an adapter of its own, or one after the other."""
    found, numbers = Found(), count()
    async with running(entry) as (connection, _, traits):
        await _load_all(connection, entry, specs, found)

        async def grow(adapter: str) -> int:
            item = _text(entry, traits, next(numbers), adapter)
            return (await connection.generate(entry.key, item)).tokens

        async def rate(keys: Sequence[str], *, at_once: bool) -> float:
            begun_s = time.monotonic()
            if at_once:
                tokens = sum(await asyncio.gather(*(grow(key) for key in keys)))
            else:
                tokens = sum([await grow(key) for key in keys])
            return tokens / (time.monotonic() - begun_s)

        keys = [spec.key for spec in specs]
        ways: dict[str, Measure] = {
            "bare": lambda: rate([""] * len(keys), at_once=True),
            "mixed": lambda: rate(keys, at_once=True),
            "separate": lambda: rate(keys, at_once=False),
        }
        await _in_turn(ways, most, found)
        await _unload_all(connection, entry, specs, found)
    return found


async def _in_turn(ways: dict[str, Measure], most: int, found: Found) -> None:
    """Rounds of all ways, everyone first in turn; the first round makes buffers and is dropped."""
    for measure in ways.values():
        await measure()
    for number in rounds(most, BUDGET_S):
        for way in rotated(list(ways), number):
            found.rates.setdefault(way, []).append(await ways[way]())


async def _load_all(
    connection: RuntimeConnection, entry: Entry, specs: Sequence[AdapterSpec], found: Found
) -> None:
    for spec in specs:
        begun_s = time.monotonic()
        await connection.load_adapter(entry.key, spec)
        found.load_s.append(time.monotonic() - begun_s)


async def _unload_all(
    connection: RuntimeConnection, entry: Entry, specs: Sequence[AdapterSpec], found: Found
) -> None:
    for spec in specs:
        begun_s = time.monotonic()
        await connection.unload_adapter(entry.key, spec.key)
        found.unload_s.append(time.monotonic() - begun_s)


def _with(item: RunItem, adapter: str) -> RunItem:
    return RunItem(
        item.item, item.task, item.lengths, ids=item.ids, id_bytes=item.id_bytes, adapter=adapter
    )


def _text(entry: Entry, traits: Traits, number: int, adapter: str) -> RunItem:
    prompt = " ".join(f"w{2 + (number + n) % 100}" for n in range(16))
    how = Params(generation=Generation(max_tokens=TOKENS, temperature=0.0))
    made = make_item(entry, traits, None, Inputs(texts=[prompt]), how, name=str(number))
    return RunItem(
        *(made.item, made.task, made.lengths),
        texts=made.texts,
        params=made.params,
        adapter=adapter,
    )


def _encoder_adapters(folder: Path, entry: Entry) -> list[AdapterSpec]:
    modules = [
        f"encoder.layer.{n}.attention.self.{part}"
        for n in range(ENCODER_LAYERS)
        for part in ("query", "value")
    ]
    return [_adapter(folder, entry, f"e{n}", modules, ENCODER_WIDTH) for n in range(ADAPTERS)]


def _generator_adapters(folder: Path, entry: Entry) -> list[AdapterSpec]:
    # SGLang takes no adapter of the queries alone.
    parts = [f"{n}.self_attn.{part}_proj" for n in range(LAYERS) for part in ("q", "v")]
    modules = [f"model.layers.{part}" for part in parts]
    return [_adapter(folder, entry, f"g{n}", modules, WIDTH) for n in range(STREAM_ADAPTERS)]


def _adapter(
    folder: Path, entry: Entry, name: str, modules: Sequence[str], width: int
) -> AdapterSpec:
    """A folder as PEFT writes it, of small random numbers on square maps."""
    place = folder / name
    place.mkdir(exist_ok=True)
    rng = np.random.default_rng(len(name) + ord(name[-1]))
    tensors = {}
    for module in modules:
        for part, shape in (("A", (RANK, width)), ("B", (width, RANK))):
            numbers = 0.01 * rng.standard_normal(shape, np.float32)
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = numbers
    save_file(tensors, place / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if entry.generates else "FEATURE_EXTRACTION",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        "bias": "none",
    }
    (place / "adapter_config.json").write_text(json.dumps(config))
    return AdapterSpec(f"{entry.id}@{name}@1", str(place))
