"""Small LoRA adapters as PEFT writes them, of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

RANK = 2
WIDTH = 4
MODULE = "encoder.layer.0.attention.self.query"


def write_adapter(folder: Path, *, seed: int = 0, width: int = WIDTH, rank: int = RANK) -> Path:
    """An adapter of one square map. Another seed, another adapter."""
    rng = np.random.default_rng(seed)
    name = f"base_model.model.{MODULE}"
    tensors = {
        f"{name}.lora_A.weight": rng.standard_normal((rank, width), np.float32),
        f"{name}.lora_B.weight": rng.standard_normal((width, rank), np.float32),
    }
    config = {
        "peft_type": "LORA",
        "task_type": "FEATURE_EXTRACTION",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [MODULE],
        "bias": "none",
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
