"""How near the outputs of base, adapter and fine-tuned model are.

Owns the texts and the cosines. Does not own the models or the adapter (`extract`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from shoal.train.encoder import Encoder

# What the fine-tuned sibling of the demo was made for, and a text that it was not.
TEXTS = (
    "pod keeps crashing",
    "CrashLoopBackOff",
    "mean time to recover",
    "MTTR",
    "kafka consumer lag is growing",
    "OOMKilled container memory limit",
    "the weather is nice",
    "MySQL lock wait timeout",
    "replica lag on the database",
    "deploy failed in canary",
)


def cosines(
    base: Encoder, tuned: Encoder, adapter: Path, texts: Sequence[str]
) -> tuple[float, float]:
    """Mean cosine with the fine-tuned model: of the base, and of the base with the adapter.

    The base has the adapter in it afterwards, loaded by PEFT.
    """
    from peft import PeftModel

    meant = tuned.encode(texts)
    bare = base.encode(texts)
    with warnings.catch_warnings():
        # PEFT asks the network about names that its library is to drop.
        warnings.simplefilter("ignore", FutureWarning)
        base.network = PeftModel.from_pretrained(base.network, str(adapter))
    adapted = base.encode(texts)
    return float((bare * meant).sum(1).mean()), float((adapted * meant).sum(1).mean())
