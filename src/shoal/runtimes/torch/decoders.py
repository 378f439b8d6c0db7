"""Decoders as embedders: what Llama, Mistral, Qwen, Gemma and EuroBERT choose.

RMS norms before each branch, rotary positions, keys and values shared by several heads; read from
left to right, or both ways where `config.json` says so. Sequences are packed or padded on the
right, so positions count from 0 and the last token is the last real one. Owns these choices; does
not own their names in the registry (`families`) or the computation (`network`).
"""

from __future__ import annotations

import math
from typing import Any

from shoal.runtimes.torch.shape import (
    Config,
    HeadNames,
    LayerShape,
    Names,
    Part,
    Plan,
    Shape,
    divided,
    rotary,
)


def _decoder_layer(*, bias: bool, out_bias: bool, mlp_bias: bool) -> dict[str, Part]:
    at = "layers.{i}"
    return {
        "attention_in": Part(f"{at}.input_layernorm", bias=False),
        "q": Part(f"{at}.self_attn.q_proj", bias),
        "k": Part(f"{at}.self_attn.k_proj", bias),
        "v": Part(f"{at}.self_attn.v_proj", bias),
        "o": Part(f"{at}.self_attn.o_proj", out_bias),
        "mlp_in": Part(f"{at}.post_attention_layernorm", bias=False),
        "gate": Part(f"{at}.mlp.gate_proj", mlp_bias),
        "up": Part(f"{at}.mlp.up_proj", mlp_bias),
        "down": Part(f"{at}.mlp.down_proj", mlp_bias),
    }


def _decoder_plan(config: Config, layer: dict[str, Part], **changes: Any) -> Plan:
    """A decoder as an embedder: RMS norms before each branch, rotary positions, shared keys."""
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    dim = config.whole("head_dim") if config.get("head_dim") else divided(config, hidden, heads)
    theta = config.number("rope_theta", default=changes.pop("theta", 10_000.0))
    layers = changes.pop("layers", None)
    if layers is None:
        rope = rotary(config, dim, theta=theta)
        window = config.get("sliding_window")
        if config.get("use_sliding_window") is False or window is None:
            kinds = ["full_attention"] * config.whole("num_hidden_layers")
        else:
            kinds = config.get("layer_types") or ["sliding_attention"] * config.whole(
                "num_hidden_layers"
            )
        layers = tuple(
            LayerShape(None if kind == "full_attention" else int(window) - 1, rope)
            for kind in kinds
        )
    shape = Shape(
        vocab=config.whole("vocab_size"),
        hidden=hidden,
        heads=heads,
        kv_heads=config.whole("num_key_value_heads", default=heads),
        head_dim=dim,
        intermediate=config.whole("intermediate_size"),
        positions=config.whole("max_position_embeddings", default=32_768),
        norm="rms",
        norm_eps=config.number("rms_norm_eps", default=1e-6),
        layers=layers,
        pad_id=config.whole("pad_token_id", default=0),
        **{
            "activation": config.get("hidden_act") or "silu",
            "causal": config.get("is_causal") is not False
            and not config.get("use_bidirectional_attention"),
            "scale": dim**-0.5,
            **changes,
        },
    )
    names = Names(
        prefixes=("model.", "language_model.", "text_model."),
        words="embed_tokens",
        final_norm=Part("norm", bias=False),
        layer=layer,
    )
    return Plan(
        shape,
        names,
        classifier=HeadNames(Part("score", bias=False), pooling="last"),
        tokens=HeadNames(Part("score")),
    )


def llama(config: Config) -> Plan:
    """Llama and Mistral; Mistral may see a window only."""
    bias, wide = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    return _decoder_plan(config, _decoder_layer(bias=bias, out_bias=bias, mlp_bias=wide))


def qwen2(config: Config) -> Plan:
    """Qwen2: biases for queries, keys and values."""
    return _decoder_plan(config, _decoder_layer(bias=True, out_bias=False, mlp_bias=False))


def qwen3(config: Config) -> Plan:
    """Qwen3: norms of each head's queries and keys."""
    bias = bool(config.get("attention_bias"))
    layer = _decoder_layer(bias=bias, out_bias=bias, mlp_bias=False)
    layer["q_norm"] = Part("layers.{i}.self_attn.q_norm", bias=False)
    layer["k_norm"] = Part("layers.{i}.self_attn.k_norm", bias=False)
    return _decoder_plan(config, layer)


def eurobert(config: Config) -> Plan:
    """EuroBERT: Llama's layers, read both ways."""
    bias, wide = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    layer = _decoder_layer(bias=bias, out_bias=bias, mlp_bias=wide)
    plan = _decoder_plan(config, layer, causal=False, theta=250_000.0)
    return Plan(plan.shape, plan.names)


def gemma3(config: Config) -> Plan:
    """Gemma 3: norms around each branch, local and global layers of different positions."""
    if config.get("attn_logit_softcapping"):
        raise config.refused("softened attention logits are unknown")
    bias = bool(config.get("attention_bias"))
    layer = _decoder_layer(bias=bias, out_bias=bias, mlp_bias=False)
    layer |= {
        "q_norm": Part("layers.{i}.self_attn.q_norm", bias=False),
        "k_norm": Part("layers.{i}.self_attn.k_norm", bias=False),
        "attention_out": Part("layers.{i}.post_attention_layernorm", bias=False),
        "mlp_in": Part("layers.{i}.pre_feedforward_layernorm", bias=False),
        "mlp_out": Part("layers.{i}.post_feedforward_layernorm", bias=False),
    }
    dim = config.whole("head_dim", default=256)
    count = config.whole("num_hidden_layers")
    every = config.whole("sliding_window_pattern", "_sliding_window_pattern", default=6)
    kinds = config.get("layer_types") or [
        "sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)
    ]
    wide = config.number("rope_theta", default=1_000_000.0)
    near = config.number("rope_local_base_freq", default=10_000.0)
    window = config.whole("sliding_window", default=4096)
    # Read both ways, the window is what is seen on both sides together.
    reach = window // 2 if config.get("use_bidirectional_attention") else window - 1
    full = LayerShape(rope=rotary(config, dim, theta=wide, layer_type="full_attention"))
    local = LayerShape(reach, rotary(config, dim, theta=near, layer_type="sliding_attention"))
    return _decoder_plan(
        config,
        layer,
        layers=tuple(full if kind == "full_attention" else local for kind in kinds),
        activation=config.get("hidden_activation") or "gelu_pytorch_tanh",
        norm_offset=1.0,
        embed_scale=math.sqrt(config.whole("hidden_size")),
        scale=config.number("query_pre_attn_scalar", default=256.0) ** -0.5,
    )
