"""A generator of random weights, small and of the usual build, for what does not depend on words.

Owns its files: config, weights and a tokenizer of whole words.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shoal.catalog.schema import Entry

WIDTH, LAYERS, HEADS = 384, 8, 6
_INNER, _WORDS, _CONTEXT = 1024, 2048, 512
_SPREAD = 0.02
_EOS = "</s>"


def write_llama(folder: Path, runtime: str) -> Entry:
    """Writes the files; the entry that serves them."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return _SPREAD * rng.standard_normal(shape, np.float32)

    ones = np.ones(WIDTH, np.float32)
    tensors = {"model.embed_tokens.weight": random(_WORDS, WIDTH), "model.norm.weight": ones}
    tensors["lm_head.weight"] = random(_WORDS, WIDTH)
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        for part in ("q", "k", "v", "o"):
            tensors[f"{layer}.self_attn.{part}_proj.weight"] = random(WIDTH, WIDTH)
        for part, shape in (
            *(("gate", (_INNER, WIDTH)), ("up", (_INNER, WIDTH))),
            ("down", (WIDTH, _INNER)),
        ):
            tensors[f"{layer}.mlp.{part}_proj.weight"] = random(*shape)
        tensors[f"{layer}.input_layernorm.weight"] = ones
        tensors[f"{layer}.post_attention_layernorm.weight"] = ones
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": _INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": _WORDS,
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder)
    return Entry(
        id="random-llama",
        tasks=["generate"],
        source=folder.as_uri(),
        runtime=runtime,
        max_tokens=_CONTEXT,
    )


def _write_tokenizer(folder: Path) -> None:
    words = {"<unk>": 0, _EOS: 1} | {f"w{n}": n for n in range(2, _WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106 - a word
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _EOS, "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
