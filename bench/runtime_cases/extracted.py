"""An adapter that was extracted from a fine-tuned model, run beside that model.

Owns the extraction (the best low-rank part of what the linear maps differ by: the first singular
vectors, Eckart and Young 1936), the texts, and the comparison: the mean cosine of the vectors of
the base with the adapter to those of the fine-tuned model, both on torch.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from runtime_cases.places import CACHE, running
from shoal.catalog.resolve import resolve_source, tokenizer_path
from shoal.catalog.schema import Entry
from shoal.catalog.snapshot import Snapshot
from shoal.catalog.variants import on_runtime
from shoal.cli.samples import encode_item
from shoal.ipc.messages import AdapterSpec, RunItem
from shoal.wire.envelope import decode_result
from shoal.worker.tokenise import Tokeniser

BASE, TUNED = "all-minilm-l6-v2", "sre-minilm"
RANK = 16
# What people who run clusters write: the fine-tuned model is theirs.
TEXTS = (
    "pod keeps crashing",
    "CrashLoopBackOff",
    "mean time to recover",
    "MTTR",
    "kafka consumer lag is growing",
    "OOMKilled: the container hit its memory limit",
    "the weather is nice",
    "lock wait timeout in the database",
    "the replica lags behind the primary",
    "the deployment failed in the canary stage",
)

Floats = npt.NDArray[np.float32]


async def cosine_of_extracted(catalog: Snapshot) -> float:
    """The mean cosine of the vectors of base and adapter to the fine-tuned model's."""
    base = on_runtime(catalog.resolve(BASE), "torch")
    tuned = on_runtime(catalog.resolve(TUNED), "torch")
    with tempfile.TemporaryDirectory() as folder:
        _extract(base, tuned, Path(folder))
        spec = AdapterSpec(f"{base.id}@extracted@1", folder)
        ours = await _vectors(base, spec)
    theirs = await _vectors(tuned, None)
    return float((ours * theirs).sum(axis=1).mean())


def _extract(base: Entry, tuned: Entry, place: Path) -> None:
    """Writes an adapter of the base, as PEFT does."""
    before, after = (
        load_file(resolve_source(entry.source, CACHE) / "model.safetensors")
        for entry in (base, tuned)
    )
    tensors, modules = {}, set()
    for name, old in before.items():
        new = after.get(name)
        if new is None or old.ndim != 2 or not name.startswith("encoder.layer."):
            continue
        u, s, v = np.linalg.svd(
            new.astype(np.float32) - old.astype(np.float32), full_matrices=False
        )
        module = name.removesuffix(".weight")
        modules.add(module)
        stored = f"base_model.model.{module}"
        tensors[f"{stored}.lora_A.weight"] = np.ascontiguousarray(v[:RANK])
        tensors[f"{stored}.lora_B.weight"] = np.ascontiguousarray(u[:, :RANK] * s[:RANK])
    save_file(tensors, place / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "FEATURE_EXTRACTION",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": sorted(modules),
        "bias": "none",
    }
    (place / "adapter_config.json").write_text(json.dumps(config))


async def _vectors(entry: Entry, spec: AdapterSpec | None) -> Floats:
    """Vectors [texts, d] of length 1."""
    async with running(entry) as (connection, _, traits):
        if spec is not None:
            await connection.load_adapter(entry.key, spec)
        tokeniser = Tokeniser(tokenizer_path(entry, CACHE), entry.max_tokens)
        items = []
        for text in TEXTS:
            item = encode_item(entry, traits, tokeniser, [text])
            key = spec.key if spec is not None else ""
            items.append(
                RunItem(
                    "", item.task, item.lengths, ids=item.ids, id_bytes=item.id_bytes, adapter=key
                )
            )
        rows = []
        for done in (await connection.run(entry.key, items)).items:
            if done.failure is not None:
                raise done.failure.error()
            rows.append(np.frombuffer(decode_result(done.result).arrays["dense"].data, "<f4"))
    vectors: Floats = np.stack(rows)
    units: Floats = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return units
