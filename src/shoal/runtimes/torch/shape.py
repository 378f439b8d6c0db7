"""What one transformer encoder may be: its numbers, and the names of its tensors in a file.

Every text family is the same network with different choices: where norms stand, how positions are
known, whether the feed-forward part is gated. Owns the words for these choices, and reading numbers
of a `config.json`. Does not own which family chooses what (`families`), the tensors (`tensors`) or
the computation (`network`). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from shoal.errors import ModelUnavailable


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What may differ from layer to layer.

    window: how far apart two tokens may be that see each other; None: any distance. rope: inverse
    frequencies of rotary positions, radians per position, head_dim / 2 of them; empty: none.
    """

    window: int | None = None
    rope: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of one network.

    positions: longest sequence. position_rows: rows of a learnt position table (0: it has none),
    of which the first `position_start` are never used. token_types: rows of the type table.
    relative_buckets: rows of a table of biases by distance. norm_offset: what is added to a norm's
    stored weight. embed_scale: what word vectors are multiplied by. scale: what attention logits
    are multiplied by.
    """

    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    positions: int
    activation: str
    norm_eps: float
    layers: tuple[LayerShape, ...]
    norm: Literal["layer", "rms"] = "layer"
    norm_offset: float = 0.0
    position_rows: int = 0
    position_start: int = 0
    token_types: int = 0
    relative_buckets: int = 0
    embed_scale: float = 1.0
    scale: float = 0.0
    causal: bool = False
    pad_id: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """Where a linear map or a norm lies: `<stored>.weight`, and `<stored>.bias` if it has one.

    block: (k, n): it is the k-th of n equal blocks of rows of a fused matrix. since: the first
    layer that has it.
    """

    stored: str
    bias: bool = True
    block: tuple[int, int] = (0, 1)
    since: int = 0


@dataclass(frozen=True, slots=True)
class Names:
    """Where a family keeps its tensors, without the `prefixes` that a checkpoint may put first.

    layer has, by the network's own names, the parts of a layer, with `{i}` for its number:
    `q k v o`, `up down` and `gate` (if gated), `q_norm k_norm`, and the norms `attention_in`
    (before the branch), `attention_out` (after it), `attention_sum` (after the residual sum), the
    same for `mlp_`. A norm that is not named is not there. modules has the linear maps of a layer
    once more, where a library gives them other names in memory than the file does: adapters name
    either.
    """

    prefixes: tuple[str, ...]
    words: str
    layer: Mapping[str, Part]
    positions: str = ""
    types: str = ""
    relative: str = ""
    embed_norm: Part | None = None
    final_norm: Part | None = None
    modules: Mapping[str, Part] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeadNames:
    """A head over token vectors or one pooled vector: dense, activation, norm, out.

    dense and norm may be missing. bias: where the bias of `out` lies if not beside its weight.
    tied: the weight of `out` is the word table if the file has no other. pooling: the vector that
    a sequence classifier reads.
    """

    out: Part
    dense: Part | None = None
    activation: str = "tanh"
    norm: Part | None = None
    pooling: Literal["cls", "mean", "last"] = "cls"
    bias: str = ""
    tied: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a family says of one checkpoint; heads that the family lacks are None."""

    shape: Shape
    names: Names
    classifier: HeadNames | None = None
    tokens: HeadNames | None = None
    words: HeadNames | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """A parsed `config.json`; every getter raises `ModelUnavailable` that names the field."""

    values: Mapping[str, Any]
    where: str

    def get(self, *names: str) -> Any:
        """The first of the fields that is there and not null, else None."""
        return next((v for name in names if (v := self.values.get(name)) is not None), None)

    def whole(self, *names: str, default: int | None = None) -> int:
        """A whole number under the first of the names that is there."""
        return int(self._number(names, default))

    def number(self, *names: str, default: float | None = None) -> float:
        """A number under the first of the names that is there."""
        return float(self._number(names, default))

    def _number(self, names: tuple[str, ...], default: float | None) -> Any:
        value = self.get(*names)
        if value is None:
            value = default
        if not isinstance(value, int | float):
            raise self.refused(f"{names[0]} is missing or no number")
        return value

    def refused(self, why: str) -> ModelUnavailable:
        """The error that says what of this checkpoint cannot be computed."""
        return ModelUnavailable(f"{self.where}: {why}")


def sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Shape of each part that a layer may have: [out, in] of maps, [width] of norms."""
    wide, inner = shape.hidden, shape.intermediate
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = ("attention_in", "attention_out", "attention_sum", "mlp_in", "mlp_out", "mlp_sum")
    return {
        "q": (queries, wide),
        "k": (keys, wide),
        "v": (keys, wide),
        "o": (wide, queries),
        "gate": (inner, wide),
        "up": (inner, wide),
        "down": (wide, inner),
        "q_norm": (shape.head_dim,),
        "k_norm": (shape.head_dim,),
        **dict.fromkeys(norms, (wide,)),
    }


def frequencies(parameters: Mapping[str, Any], dim: int, config: Config) -> tuple[float, ...]:
    """Inverse frequencies of rotary positions (Su et al. 2021), float32, dim / 2 of them.

    Kinds: default, linear (positions divided by `factor`), llama3 (long wavelengths are divided,
    as Llama 3.1 does), ntk (a longer base, as GTE's checkpoints have it; not compared with a
    reference). Raises `ModelUnavailable` for another.
    """
    theta = float(parameters.get("rope_theta") or 10_000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    factor = float(parameters.get("factor") or 1.0)
    if kind == "ntk":
        theta *= factor
    inverse = 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    if kind == "ntk":
        inverse = inverse / factor ** (2 / dim)
    elif kind == "linear":
        inverse = inverse / factor
    elif kind == "llama3":
        inverse = _llama3(inverse, parameters)
    elif kind != "default":
        raise config.refused(f"rotary positions of type {kind!r} are unknown")
    return tuple(inverse.astype(np.float32).tolist())


def _llama3(inverse: Any, parameters: Mapping[str, Any]) -> Any:
    factor, low, high, trained = (
        float(parameters[name])
        for name in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        )
    )
    wavelength = 2 * np.pi / inverse
    smooth = np.clip((trained / wavelength - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * inverse / factor + smooth * inverse


def rotary(config: Config, dim: int, *, theta: float, layer_type: str = "") -> tuple[float, ...]:
    """Inverse frequencies as config.json has them, in the forms of old and new checkpoints."""
    parameters: dict[str, Any] = dict(config.get("rope_parameters", "rope_scaling") or {})
    if layer_type and layer_type in parameters:
        parameters = dict(parameters[layer_type])
    elif layer_type == "sliding_attention":
        parameters = {}
    parameters.setdefault("rope_theta", theta)
    return frequencies(parameters, dim, config)


def divided(config: Config, hidden: int, heads: int) -> int:
    """Length of one attention head's vectors. Raises `ModelUnavailable` for a remainder."""
    if hidden % heads:
        raise config.refused(f"{heads} heads do not divide {hidden} dimensions")
    return hidden // heads
