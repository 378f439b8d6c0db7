"""An adapter that was extracted from a fine-tuned model, run beside that model.

Owns the texts and the comparison: the mean cosine of the vectors of the base with the adapter to
those of the fine-tuned model, both on torch. Does not own the extraction, which is the example
`examples/lora_from_finetune`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from runtime_cases.places import CACHE, running
from shoal.catalog.resolve import tokenizer_path
from shoal.catalog.schema import Entry
from shoal.catalog.snapshot import Snapshot
from shoal.catalog.variants import on_runtime
from shoal.cli.samples import encode_item
from shoal.ipc.messages import AdapterSpec, RunItem
from shoal.wire.envelope import decode_result
from shoal.worker.tokenise import Tokeniser

BASE, TUNED = "all-minilm-l6-v2", "sre-minilm"
RANK = 16
ROOT = Path(__file__).parents[2]
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
        place = Path(folder) / "adapter"
        _extract(base, tuned, place)
        spec = AdapterSpec(f"{base.id}@extracted@1", str(place))
        ours = await _vectors(base, spec)
    theirs = await _vectors(tuned, None)
    return float((ours * theirs).sum(axis=1).mean())


def _extract(base: Entry, tuned: Entry, place: Path) -> None:
    """Has the example write an adapter of the base."""
    names = ("--base", base.id, "--tuned", tuned.id, "--rank", str(RANK), "--out", str(place))
    command = [sys.executable, "-m", "examples.lora_from_finetune", *names]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


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
