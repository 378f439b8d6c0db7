"""An adapter that turns a base model into its fine-tuned sibling, as nearly as its rank allows.

Owns the decomposition and the files in PEFT's form. The difference of each pair of linear layers is
cut to its `rank` largest singular values, which is the nearest matrix of that rank (Eckart and
Young 1936). What else differs, such as embeddings, norms and biases, is no part of an adapter and
stays the base's. Does not own how near the outputs are (`compare`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.train.card import settle
from shoal.train.encoder import Encoder, linear_layers


@dataclass(frozen=True)
class Extracted:
    """What is in the adapter. kept: share of the squared difference that its rank keeps.

    left_out: tensors that differ and that an adapter cannot hold.
    """

    layers: int
    parameters: int
    kept: float
    left_out: int


def extract(base: Encoder, tuned: Encoder, rank: int, out: Path) -> Extracted:
    """Writes the adapter into the new folder `out`. Raises ValueError for unlike networks."""
    import torch
    from peft import LoraConfig
    from safetensors.torch import save_file

    before, after = (dict(each.network.state_dict()) for each in (base, tuned))
    if {name: each.shape for name, each in before.items()} != {
        name: each.shape for name, each in after.items()
    }:
        raise ValueError(f"{base.entry.id} and {tuned.entry.id} are not of the same form")
    kinds = linear_layers(base.network)
    layers = [name for name in before if _is_of(name, kinds)]
    weights: dict[str, Any] = {}
    whole = kept = 0.0
    for name in layers:
        difference = after[name].float() - before[name].float()
        left, values, right = torch.linalg.svd(difference, full_matrices=False)
        roots = values[:rank].sqrt()
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        weights[f"{layer}.lora_A.weight"] = (roots[:, None] * right[:rank]).contiguous()
        weights[f"{layer}.lora_B.weight"] = (left[:, :rank] * roots).contiguous()
        whole += float((values**2).sum())
        kept += float((values[:rank] ** 2).sum())
    out.mkdir(parents=True)
    save_file(weights, out / "adapter_model.safetensors", metadata={"format": "pt"})
    # The scale of an adapter is alpha / rank: here 1.
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=kinds,
        base_model_name_or_path=base.entry.id,
        inference_mode=True,
    )
    config.save_pretrained(str(out))
    settle(out)
    others = [name for name in before if name not in layers and _read(name)]
    return Extracted(
        layers=len(layers),
        parameters=sum(each.numel() for each in weights.values()),
        kept=kept / whole if whole else 1.0,
        left_out=sum(not torch.equal(before[name], after[name]) for name in others),
    )


def _is_of(name: str, kinds: list[str]) -> bool:
    return any(name.endswith(f".{kind}.weight") for kind in kinds)


def _read(name: str) -> bool:
    """Whether a vector depends on the tensor; the pooler is for another task."""
    return not name.startswith("pooler.")
