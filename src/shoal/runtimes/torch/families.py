"""The families of text checkpoints: what of the general transformer each of them uses.

One function per kind of checkpoint reads its `config.json` into a `Plan`; `FAMILIES` names them.
Owns that registry and finding a checkpoint's family. Does not own the words of a plan (`shape`),
the tensors (`tensors`) or the computation (`network`). Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.errors import ModelUnavailable
from shoal.runtimes.torch import decoders, encoders
from shoal.runtimes.torch.shape import Config, Plan

TASKS = ("ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification")
_CLASS = re.compile(r"(\w+?)(Model|TextModel|For[A-Z]\w*)")


@dataclass(frozen=True, slots=True)
class Family:
    """One code path. model_types and classes are how its checkpoints call themselves."""

    about: str
    read: Callable[[Config], Plan]
    model_types: tuple[str, ...]
    classes: tuple[str, ...]
    tasks: tuple[str, ...] = TASKS


DECODERS = (*TASKS[2:], "ForCausalLM")
FAMILIES: dict[str, Family] = {
    "bert": Family("BERT encoders", encoders.bert, ("bert",), ("Bert",)),
    "roberta": Family(
        "RoBERTa, XLM-RoBERTa and CamemBERT encoders",
        encoders.roberta,
        ("roberta", "xlm-roberta", "camembert"),
        ("Roberta", "XLMRoberta", "Camembert"),
    ),
    "mpnet": Family("MPNet encoders: biases by distance", encoders.mpnet, ("mpnet",), ("MPNet",)),
    "distilbert": Family(
        "DistilBERT encoders", encoders.distilbert, ("distilbert",), ("DistilBert",)
    ),
    "modernbert": Family(
        "ModernBERT encoders: rotary positions, local and global attention",
        encoders.modernbert,
        ("modernbert",),
        ("ModernBert",),
    ),
    "nomic-bert": Family(
        "NomicBERT encoders: rotary positions, gated",
        encoders.nomic_bert,
        ("nomic_bert",),
        ("NomicBert",),
        (),
    ),
    "gte": Family(
        "GTE encoders: rotary positions, gated",
        encoders.gte,
        ("gte", "new"),
        ("Gte", "New"),
        TASKS[2:],
    ),
    "eurobert": Family(
        "EuroBERT encoders: a decoder's layers read both ways",
        decoders.eurobert,
        ("eurobert",),
        ("EuroBert",),
        TASKS[:1],
    ),
    "llama": Family(
        "Llama and Mistral decoders as embedders",
        decoders.llama,
        ("llama", "mistral"),
        ("Llama", "Mistral"),
        DECODERS,
    ),
    "qwen2": Family(
        "Qwen2 decoders as embedders", decoders.qwen2, ("qwen2",), ("Qwen2",), DECODERS
    ),
    "qwen3": Family(
        "Qwen3 decoders as embedders", decoders.qwen3, ("qwen3",), ("Qwen3",), DECODERS
    ),
    "gemma3": Family(
        "Gemma 3 text decoders as embedders",
        decoders.gemma3,
        ("gemma3_text",),
        ("Gemma3", "Gemma3Text"),
        DECODERS,
    ),
}
# Image networks have no config.json: the catalog entry names the family.
IMAGES = {"efficientnet": "EfficientNet and EfficientNet-lite image classifiers and encoders"}
# Nor have these text networks, which are no choice of the general one.
OWN = {"nanochat": "Classifiers with nanochat's layers, read both ways"}
ABOUT = {name: family.about for name, family in FAMILIES.items()} | IMAGES | OWN


def find(config: Mapping[str, Any], forced: str | None, where: str) -> Family:
    """The family of a checkpoint: the forced one, else by `architectures`, else by `model_type`.

    Raises `ModelUnavailable` that lists the known families.
    """
    if forced is not None:
        if forced in FAMILIES:
            return FAMILIES[forced]
        raise _unknown(where, f"family {forced}")
    named = [str(name) for name in config.get("architectures") or []]
    for name in named:
        match = _CLASS.fullmatch(name)
        for family in FAMILIES.values() if match else ():
            what = match[2] if match else ""
            if match and match[1] in family.classes and (what[:3] != "For" or what in family.tasks):
                return family
    if not named:
        for family in FAMILIES.values():
            if config.get("model_type") in family.model_types:
                return family
    raise _unknown(where, ", ".join(named) or config.get("model_type") or "an unnamed architecture")


def _unknown(where: str, what: str) -> ModelUnavailable:
    return ModelUnavailable(f"{where}: {what} is not supported; known: {', '.join(ABOUT)}")
