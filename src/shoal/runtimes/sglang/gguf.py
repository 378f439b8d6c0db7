"""A GGUF file as the folder of safetensors that SGLang reads on a CPU.

    python -m shoal.runtimes.sglang.gguf FILE FOLDER

On CPUs SGLang has no kernels for packed weights, so they are unpacked once, in float16, by
transformers, in a process of its own (which imports torch), and kept in the model's cache. Owns the
place of the result, making it whole or not at all, and how many are kept. Does not own what is in
it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

from shoal.errors import ModelUnavailable
from shoal.ipc.child import Command
from shoal.settings import other_environment

log = logging.getLogger(__name__)

MAX_UNPACKED = 4
UNPACK_S = 1800.0
_TAIL_CHARS = 400
_MODULE = "shoal.runtimes.sglang.gguf"


def unpacked(key: str, file: Path, cache_dir: Path) -> Path:
    """The folder that a GGUF file was, or now is, unpacked into. Raises `ModelUnavailable`."""
    about = file.stat()
    facts = f"{file.resolve()} {about.st_size} {about.st_mtime_ns}"
    folder = cache_dir / "unpacked" / hashlib.sha256(facts.encode()).hexdigest()[:24]
    if folder.is_dir():
        keep_last(folder)
        return folder
    log.info("%s: unpacking %s", key, file)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(mkdtemp(dir=folder.parent, prefix="half-"))
    try:
        done = subprocess.run(  # noqa: S603 - our own command
            Command("unpack", [str(file), str(made)], module=_MODULE).argv(),
            check=False,
            capture_output=True,
            timeout=UNPACK_S,
            env=other_environment({"HF_HUB_OFFLINE": "1"}),
        )
        if done.returncode != 0:
            said = done.stderr.decode("utf-8", "replace").strip()[-_TAIL_CHARS:]
            raise ModelUnavailable(f"{key}: {file} cannot be unpacked: {said}")
        made.replace(folder)
    except subprocess.TimeoutExpired as error:
        raise ModelUnavailable(f"{key}: unpacking took more than {UNPACK_S:.0f} s") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    keep_last(folder)
    return folder


def keep_last(folder: Path) -> None:
    """Marks what was unpacked as used now, and removes what of its kind was not for longest."""
    os.utime(folder)
    with suppress(FileNotFoundError):  # another process removes as well
        by_use = sorted(folder.parent.iterdir(), key=lambda one: one.stat().st_mtime_ns)
        for old in by_use[:-MAX_UNPACKED]:
            shutil.rmtree(old, ignore_errors=True)


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
