"""A GGUF file as the folder of safetensors that SGLang reads on a CPU.

    python -m shoal.runtimes.sglang.gguf FILE FOLDER

On CPUs SGLang has no kernels for packed weights, so they are unpacked once, in float16, by
transformers, in a process of its own (which imports torch). Owns what the folder has. Does not own
its place (`unpacked`).
"""

from __future__ import annotations

import sys
from pathlib import Path

MODULE = "shoal.runtimes.sglang.gguf"


def main(file: Path, folder: Path) -> None:
    """Unpacks a file into a folder: weights, config and tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    network = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float16)
    config = network.config
    for field in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, field):
            delattr(config, field)
    config.architectures = [type(network).__name__]
    weights = network.state_dict()
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    if packed := [name for name, values in weights.items() if not values.is_floating_point()]:
        raise SystemExit(f"{packed[0]} stays packed")
    # Saved by hand: transformers keeps a model from GGUF for packed, also when it has unpacked it.
    save_file(
        {name: values.to(torch.float16).contiguous() for name, values in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
