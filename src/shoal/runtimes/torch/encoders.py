"""Encoders: what BERT, RoBERTa, MPNet, DistilBERT, NomicBERT, GTE and ModernBERT choose.

Each function reads one family's `config.json` into a `Plan`. Follows Devlin et al. 2018 (BERT),
Liu et al. 2019 (RoBERTa), Song et al. 2020 (MPNet), Sanh et al. 2019 (DistilBERT), Nussbaum et al.
2024 (NomicBERT), Zhang et al. 2024 (mGTE) and Warner et al. 2024 (ModernBERT). Owns these choices;
does not own their names in the registry (`families`) or the computation (`network`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

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


def _bert_like(config: Config, layer: Mapping[str, Part], **names: Any) -> tuple[Shape, Names]:
    """What the encoders with learnt positions and norms after each branch have in common."""
    hidden, heads = config.whole("hidden_size", "dim"), config.whole("num_attention_heads")
    head_dim = divided(config, hidden, heads)
    rows = config.whole("max_position_embeddings")
    shape = Shape(
        vocab=config.whole("vocab_size"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        intermediate=config.whole("intermediate_size"),
        positions=rows - names.get("start", 0),
        position_rows=rows,
        position_start=names.pop("start", 0),
        token_types=config.whole("type_vocab_size", default=2) if "types" in names else 0,
        relative_buckets=names.pop("buckets", 0),
        activation=config.get("hidden_act") or "gelu",
        norm_eps=config.number("layer_norm_eps", default=1e-12),
        layers=(LayerShape(),) * config.whole("num_hidden_layers"),
        scale=head_dim**-0.5,
        pad_id=config.whole("pad_token_id", default=0),
    )
    return shape, Names(
        words="embeddings.word_embeddings",
        positions="embeddings.position_embeddings",
        embed_norm=Part("embeddings.LayerNorm"),
        layer=layer,
        **names,
    )


def _encoder_only(config: Config) -> None:
    kind = config.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise config.refused(f"{kind} position embeddings are unknown")
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise config.refused("this is a decoder; encoders are supported")


BERT_LAYER = {
    "q": Part("encoder.layer.{i}.attention.self.query"),
    "k": Part("encoder.layer.{i}.attention.self.key"),
    "v": Part("encoder.layer.{i}.attention.self.value"),
    "o": Part("encoder.layer.{i}.attention.output.dense"),
    "attention_sum": Part("encoder.layer.{i}.attention.output.LayerNorm"),
    "up": Part("encoder.layer.{i}.intermediate.dense"),
    "down": Part("encoder.layer.{i}.output.dense"),
    "mlp_sum": Part("encoder.layer.{i}.output.LayerNorm"),
}
_PLAIN = HeadNames(Part("classifier"))
_POOLED = HeadNames(Part("classifier"), Part("pooler.dense"))
_TWO_STEPS = HeadNames(Part("classifier.out_proj"), Part("classifier.dense"))


def _lm_head(activation: str) -> HeadNames:
    norm = Part("lm_head.layer_norm")
    dense = Part("lm_head.dense")
    return HeadNames(
        Part("lm_head.decoder"), dense, activation, norm, bias="lm_head.bias", tied=True
    )


def _mlm(activation: str) -> HeadNames:
    at = "cls.predictions"
    return HeadNames(
        Part(f"{at}.decoder"),
        Part(f"{at}.transform.dense"),
        activation,
        Part(f"{at}.transform.LayerNorm"),
        bias=f"{at}.bias",
        tied=True,
    )


def bert(config: Config) -> Plan:
    """BERT: learnt positions, norms after each branch."""
    _encoder_only(config)
    types = "embeddings.token_type_embeddings"
    shape, names = _bert_like(config, BERT_LAYER, prefixes=("bert.",), types=types)
    return Plan(shape, names, _POOLED, _PLAIN, _mlm(shape.activation))


def roberta(config: Config) -> Plan:
    """RoBERTa and XLM-RoBERTa: BERT whose positions begin after the padding's."""
    _encoder_only(config)
    # The rows up to the padding's own are never used: positions count from the one after it.
    start = config.whole("pad_token_id", default=1) + 1
    types = "embeddings.token_type_embeddings"
    prefixes = ("roberta.", "camembert.")
    shape, names = _bert_like(config, BERT_LAYER, prefixes=prefixes, types=types, start=start)
    return Plan(shape, names, _TWO_STEPS, _PLAIN, _lm_head("gelu"))


def mpnet(config: Config) -> Plan:
    """MPNet: BERT with biases by distance, shared by all layers, and no types."""
    renamed = {
        "q": "attention.attn.q",
        "k": "attention.attn.k",
        "v": "attention.attn.v",
        "o": "attention.attn.o",
        "attention_sum": "attention.LayerNorm",
    }
    layer = BERT_LAYER | {
        name: Part(f"encoder.layer.{{i}}.{stored}") for name, stored in renamed.items()
    }
    shape, names = _bert_like(
        config,
        layer,
        prefixes=("mpnet.",),
        start=config.whole("pad_token_id", default=1) + 1,
        relative="encoder.relative_attention_bias",
        buckets=config.whole("relative_attention_num_buckets", default=32),
    )
    return Plan(shape, names, _TWO_STEPS, _PLAIN, _lm_head("gelu"))


def distilbert(config: Config) -> Plan:
    """DistilBERT: BERT without types, by other names."""
    at = "transformer.layer.{i}"
    layer = {
        "q": Part(f"{at}.attention.q_lin"),
        "k": Part(f"{at}.attention.k_lin"),
        "v": Part(f"{at}.attention.v_lin"),
        "o": Part(f"{at}.attention.out_lin"),
        "attention_sum": Part(f"{at}.sa_layer_norm"),
        "up": Part(f"{at}.ffn.lin1"),
        "down": Part(f"{at}.ffn.lin2"),
        "mlp_sum": Part(f"{at}.output_layer_norm"),
    }
    same = {
        "hidden_size": config.get("dim"),
        "num_attention_heads": config.get("n_heads"),
        "num_hidden_layers": config.get("n_layers"),
        "intermediate_size": config.get("hidden_dim"),
        "hidden_act": config.get("activation"),
    }
    config = Config({**config.values, **same}, config.where)
    shape, names = _bert_like(config, layer, prefixes=("distilbert.",))
    words = HeadNames(
        Part("vocab_projector"),
        Part("vocab_transform"),
        shape.activation,
        Part("vocab_layer_norm"),
        tied=True,
    )
    pooled = HeadNames(Part("classifier"), Part("pre_classifier"), "relu")
    return Plan(shape, names, pooled, _PLAIN, words)


def _fused(at: str, stored: str, names: str, *, bias: bool) -> dict[str, Part]:
    """Parts that lie one after the other in one matrix."""
    kinds = names.split()
    return {name: Part(f"{at}.{stored}", bias, (k, len(kinds))) for k, name in enumerate(kinds)}


def _apart(at: str, *, bias: bool) -> dict[str, Part]:
    """The maps of a layer as transformers has them in memory, whatever is fused in the file."""
    attention = {name: Part(f"{at}.self_attn.{name}_proj", bias) for name in "qkvo"}
    return attention | {name: Part(f"{at}.mlp.{name}_proj") for name in ("gate", "up", "down")}


def _rotary_encoder(config: Config, **changes: Any) -> Shape:
    """An encoder with rotary positions and norms after each branch (NomicBERT, GTE)."""
    hidden = config.whole("hidden_size", "n_embd")
    heads = config.whole("num_attention_heads", "n_head")
    dim = divided(config, hidden, heads)
    theta = config.number("rope_theta", "rotary_emb_base", default=changes.pop("theta"))
    rope = rotary(config, dim, theta=theta)
    return Shape(
        vocab=config.whole("vocab_size"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        intermediate=config.whole("intermediate_size", "n_inner"),
        positions=config.whole("max_position_embeddings", "n_positions"),
        token_types=config.whole("type_vocab_size", default=changes.pop("types")),
        norm_eps=config.number("layer_norm_eps", "layer_norm_epsilon", default=1e-12),
        layers=(LayerShape(rope=rope),) * config.whole("num_hidden_layers", "n_layer"),
        scale=dim**-0.5,
        pad_id=config.whole("pad_token_id", default=0),
        **changes,
    )


def nomic_bert(config: Config) -> Plan:
    """NomicBERT: rotary positions, gated, fused queries, keys and values."""
    if config.get("activation_function") not in (None, "swiglu") or config.get("prenorm"):
        raise config.refused("of NomicBERT only the gated kind with norms after is known")
    if config.number("rotary_emb_fraction", default=1.0) != 1 or config.get("qkv_proj_bias"):
        raise config.refused("of NomicBERT only whole rotary positions without biases are known")
    at = "encoder.layers.{i}"
    layer = _fused(at, "attn.Wqkv", "q k v", bias=False) | {
        "o": Part(f"{at}.attn.out_proj", bias=False),
        "attention_sum": Part(f"{at}.norm1"),
        "up": Part(f"{at}.mlp.fc11", bias=False),
        "gate": Part(f"{at}.mlp.fc12", bias=False),
        "down": Part(f"{at}.mlp.fc2", bias=False),
        "mlp_sum": Part(f"{at}.norm2"),
    }
    activation = config.get("hidden_act") or "silu"
    shape = _rotary_encoder(config, theta=1000.0, types=2, activation=activation)
    names = Names(
        prefixes=("bert.", "nomic_bert."),
        words="embeddings.word_embeddings",
        types="embeddings.token_type_embeddings",
        embed_norm=Part("emb_ln"),
        layer=layer,
        modules=_apart("layers.{i}", bias=False),
    )
    return Plan(shape, names)


def gte(config: Config) -> Plan:
    """GTE (mGTE): rotary positions, gated, more of it fused."""
    at = "encoder.layer.{i}"
    layer = (
        _fused(at, "attention.qkv_proj", "q k v", bias=True)
        | _fused(at, "mlp.up_gate_proj", "up gate", bias=False)
        | {
            "o": Part(f"{at}.attention.o_proj"),
            "attention_sum": Part(f"{at}.attn_ln"),
            "down": Part(f"{at}.mlp.down_proj"),
            "mlp_sum": Part(f"{at}.mlp_ln"),
        }
    )
    activation = config.get("hidden_act") or "gelu"
    shape = _rotary_encoder(config, theta=160_000.0, types=1, activation=activation)
    names = Names(
        prefixes=("new.", "gte."),
        words="embeddings.word_embeddings",
        types="embeddings.token_type_embeddings" if shape.token_types else "",
        embed_norm=Part("embeddings.LayerNorm"),
        layer=layer,
        modules=_apart("layers.{i}", bias=True),
    )
    return Plan(shape, names, _POOLED, _PLAIN)


def modernbert(config: Config) -> Plan:
    """ModernBERT: norms before each branch, two of three layers see a window only."""
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    dim = divided(config, hidden, heads)
    count, every = (
        config.whole("num_hidden_layers"),
        config.whole("global_attn_every_n_layers", default=3),
    )
    kinds = config.get("layer_types") or [
        "sliding_attention" if i % every else "full_attention" for i in range(count)
    ]
    wide = config.number("global_rope_theta", default=160_000.0)
    near = config.number("local_rope_theta", default=10_000.0)
    half_window = config.whole("local_attention", default=128) // 2
    full = LayerShape(rope=rotary(config, dim, theta=wide, layer_type="full_attention"))
    local = LayerShape(half_window, rotary(config, dim, theta=near, layer_type="sliding_attention"))
    norm_bias = bool(config.get("norm_bias"))
    attends, widens = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    at = "layers.{i}"
    layer = (
        _fused(at, "attn.Wqkv", "q k v", bias=attends)
        | _fused(at, "mlp.Wi", "gate up", bias=widens)
        | {
            "attention_in": Part(f"{at}.attn_norm", norm_bias, since=1),
            "o": Part(f"{at}.attn.Wo", attends),
            "mlp_in": Part(f"{at}.mlp_norm", norm_bias),
            "down": Part(f"{at}.mlp.Wo", widens),
        }
    )
    shape = Shape(
        vocab=config.whole("vocab_size"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        intermediate=config.whole("intermediate_size"),
        positions=config.whole("max_position_embeddings", default=8192),
        activation=config.get("hidden_activation") or "gelu",
        norm_eps=config.number("norm_eps", default=1e-5),
        layers=tuple(full if kind == "full_attention" else local for kind in kinds),
        scale=dim**-0.5,
        pad_id=config.whole("pad_token_id", default=0),
    )
    names = Names(
        prefixes=("model.",),
        words="embeddings.tok_embeddings",
        embed_norm=Part("embeddings.norm", norm_bias),
        final_norm=Part("final_norm", norm_bias),
        layer=layer,
    )
    dense = Part("head.dense", bool(config.get("classifier_bias")))
    norm = Part("head.norm", norm_bias)
    activation = config.get("classifier_activation") or "gelu"
    pooling: Literal["cls", "mean"] = (
        "mean" if config.get("classifier_pooling") == "mean" else "cls"
    )
    classifier = HeadNames(Part("classifier"), dense, activation, norm, pooling)
    decoder = Part("decoder", config.get("decoder_bias") is not False)
    words = HeadNames(decoder, dense, activation, norm, tied=True)
    return Plan(shape, names, classifier, classifier, words)
