"""What each runtime that takes adapters is checked with: a model, adapters that fit, and others.

Owns making adapters in PEFT's form, of random weights. Makes no call and holds no claim.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from safetensors.numpy import save_file

from tests.contract.small import continued, shapes, small_llama
from tests.contract.speakers import Speaker, speaker
from tests.contract.subjects import TEXTS, Subject, subject
from tests.support.runtime_models import MINILM, ids_of, package_path

RANK = 4
WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Folders:
    """Adapters of one model. fits: three that differ. broken: what none of is one, by its fault."""

    fits: list[Path]
    broken: dict[str, Path]


@dataclass(frozen=True, slots=True)
class Adaptable:
    """What one runtime that takes adapters is checked with.

    subject: a model, and what it is asked. folders: makes adapters of it in a folder. reference:
    what the makers' own code answers to the subject's first two inputs with an adapter.
    """

    subject: Subject | Speaker
    folders: Callable[[Path], Folders]
    reference: Callable[[Path], list[Any]] | None = None


def adaptable(runtime: str, folder: Path) -> Adaptable:
    """What a runtime is checked with; models that are made lie in the folder.

    Skips where a package with weights is missing.
    """
    return {
        "null": lambda: Adaptable(subject("null"), _nothing),
        "candle": lambda: _small(folder / "small-llama", "candle"),
        "sglang": lambda: _small(folder / "small-llama", "sglang", max_adapters=8),
        "torch": lambda: Adaptable(subject("torch"), _of_minilm, _by_peft),
    }[runtime]()


def _nothing(folder: Path) -> Folders:
    """The null runtime opens no adapter."""
    return Folders([folder / name for name in "abc"], {"broken": folder / "broken"})


def _small(folder: Path, runtime: str, **options: int) -> Adaptable:
    """A small Llama: the adapters of the demo catalog's generator would need its safetensors."""
    entry = small_llama(folder, runtime)
    entry = structs.replace(entry, options=entry.options | options)
    prompts = ["once upon a time", "abc", "a shoal is a group of fish", "who", "are you", "there"]
    about = replace(speaker(runtime), entry=entry, prompts=prompts)
    return Adaptable(
        about,
        lambda place: made(shapes(), "CAUSAL_LM", place),
        lambda adapter: continued(folder, prompts[:2], about.tokens, adapter),
    )


def _of_minilm(folder: Path) -> Folders:
    """Adapters of the queries and values of MiniLM's attention, and of what is behind it."""
    layers = {}
    for at in range(6):
        layer = f"encoder.layer.{at}"
        layers[f"{layer}.attention.self.query"] = (384, 384)
        layers[f"{layer}.attention.self.value"] = (384, 384)
        layers[f"{layer}.output.dense"] = (1536, 384)
    return made(layers, "FEATURE_EXTRACTION", folder)


def _by_peft(adapter: Path) -> list[list[np.ndarray]]:
    """By PEFT around transformers, each text alone."""
    import torch
    from peft import PeftModel
    from transformers import AutoModel

    folder = package_path(MINILM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads a name that will go
        adapted = PeftModel.from_pretrained(AutoModel.from_pretrained(folder), adapter).eval()
    found = []
    for ids in ids_of(folder, *TEXTS[:2]):
        with torch.inference_mode():
            hidden = adapted(input_ids=torch.tensor([ids])).last_hidden_state[0]
        mean = hidden.mean(dim=0)
        found.append([(mean / mean.norm()).numpy()])
    return found


def made(layers: Mapping[str, tuple[int, int]], task: str, folder: Path) -> Folders:
    """Three adapters of a model, and four folders that are none.

    layers: length of what goes in and of what comes out of each layer, by its path in the model.
    task: as PEFT names it.
    """
    fits = [_adapter(folder / f"fits-{seed}", layers, task, seed) for seed in range(3)]
    wider = {layer: (n_in + 8, n_out + 8) for layer, (n_in, n_out) in layers.items()}
    broken = {
        "another base": _adapter(folder / "another-base", wider, task, 0),
        "half a file": _adapter(folder / "half-a-file", layers, task, 0),
        "half a pair": _adapter(folder / "half-a-pair", layers, task, 0, half=True),
        "no file": folder / "nowhere",
    }
    weights = broken["half a file"] / WEIGHTS
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return Folders(fits, broken)


def _adapter(
    folder: Path,
    layers: Mapping[str, tuple[int, int]],
    task: str,
    seed: int,
    *,
    half: bool = False,
) -> Path:
    """An adapter. half: each layer lacks the second of its two matrices."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for layer, (n_in, n_out) in layers.items():
        name = f"base_model.model.{layer}"
        tensors[f"{name}.lora_A.weight"] = _random(rng, RANK, n_in)
        if not half:
            tensors[f"{name}.lora_B.weight"] = _random(rng, n_out, RANK)
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS)
    config = {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": None,
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
        "target_modules": sorted(layers),
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _random(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Float32, of a size that changes answers and keeps them finite."""
    return (rng.standard_normal((rows, columns)) * 0.1).astype(np.float32)
