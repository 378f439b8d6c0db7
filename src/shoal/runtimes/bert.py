"""What a folder in the BERT format holds: its shape, and its weights under one set of names.

Owns reading `config.json`, the checks that a checkpoint fits it, and the names: checkpoints write
the same tensors with or without a `bert.` prefix, with `gamma` and `beta` for a layer norm's
`weight` and `bias`, with the decoder tied to the word embeddings or apart. Does not own how the
network is computed (`onnx.graph`, `torch.network`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import ModelUnavailable
from shoal.ipc.messages import ModelSpec
from shoal.runtimes.checkpoint import SafetensorsFile
from shoal.runtimes.heads import Head, as_float32, called

Floats = npt.NDArray[np.float32]

ARCHITECTURES = (
    "BertModel",
    "BertForMaskedLM",
    "BertForPreTraining",
    "BertForSequenceClassification",
    "BertForTokenClassification",
)
ACTIVATIONS = (
    "gelu",
    "gelu_new",
    "gelu_pytorch_tanh",
    "gelu_fast",
    "relu",
    "silu",
    "swish",
    "tanh",
)

WORDS = "embeddings.word_embeddings.weight"
POSITIONS = "embeddings.position_embeddings.weight"
TYPES = "embeddings.token_type_embeddings.weight"
MLM = "cls.predictions"
MLM_TRANSFORM = f"{MLM}.transform.dense"
MLM_NORM = f"{MLM}.transform.LayerNorm"
MLM_DECODER = f"{MLM}.decoder"
POOLER = "pooler.dense"
CLASSIFIER = "classifier"


@dataclass(frozen=True, slots=True)
class BertShape:
    """The numbers of a BERT-family network, as `config.json` names them."""

    architecture: str
    vocab: int
    hidden: int
    layers: int
    attention_heads: int
    intermediate: int
    positions: int
    token_types: int
    activation: str
    norm_eps: float
    pad_id: int

    @property
    def head_dim(self) -> int:
        """Length of one attention head's vectors."""
        return self.hidden // self.attention_heads

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> BertShape:
        """From a parsed `config.json`. Raises `ModelUnavailable` for what cannot be computed."""
        architecture = _architecture(config, where)
        activation = config.get("hidden_act", "gelu")
        if activation not in ACTIVATIONS:
            raise ModelUnavailable(
                f"{where}: hidden_act {activation!r} is not supported; known: "
                f"{', '.join(ACTIVATIONS)}"
            )
        positions_kind = config.get("position_embedding_type") or "absolute"
        if positions_kind != "absolute":
            raise ModelUnavailable(f"{where}: {positions_kind} position embeddings are unknown")
        if config.get("is_decoder") or config.get("add_cross_attention"):
            raise ModelUnavailable(f"{where}: this is a decoder; encoders are supported")
        try:
            shape = cls(
                architecture=architecture,
                vocab=int(config["vocab_size"]),
                hidden=int(config["hidden_size"]),
                layers=int(config["num_hidden_layers"]),
                attention_heads=int(config["num_attention_heads"]),
                intermediate=int(config["intermediate_size"]),
                positions=int(config["max_position_embeddings"]),
                token_types=int(config.get("type_vocab_size", 2)),
                activation=activation,
                norm_eps=float(config.get("layer_norm_eps", 1e-12)),
                pad_id=int(config.get("pad_token_id") or 0),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ModelUnavailable(f"{where}: {error} is missing or no number") from error
        if shape.hidden % shape.attention_heads:
            raise ModelUnavailable(
                f"{where}: {shape.attention_heads} heads do not divide {shape.hidden} dimensions"
            )
        return shape


def _architecture(config: Mapping[str, Any], where: str) -> str:
    named = config.get("architectures") or []
    known = [name for name in named if name in ARCHITECTURES]
    if known:
        return str(known[0])
    if not named and config.get("model_type") == "bert":
        return "BertModel"
    what = ", ".join(named) or config.get("model_type") or "an unnamed architecture"
    raise ModelUnavailable(f"{where}: {what} is not supported; known: {', '.join(ARCHITECTURES)}")


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed `config.json` of a model folder."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ModelUnavailable(f"{path} is not there") from error
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelUnavailable(f"{path} is no JSON object")
    return config


def config_beside(folder: Path) -> dict[str, Any]:
    """The parsed `config.json` of a folder, or nothing where there is none."""
    return read_config(folder) if (folder / "config.json").is_file() else {}


class BertWeights(Mapping[str, Floats]):
    """The tensors of a checkpoint under canonical names, float32, checked against the shape.

    Canonical is what `BertModel` alone would write (`encoder.layer.0...`, `weight`, `bias`), the
    masked-language head under `cls.predictions`, and the classifier under `classifier`.
    """

    def __init__(self, file: SafetensorsFile, shape: BertShape) -> None:
        self._file = file
        self._stored = {_canonical(name): name for name in file}
        if MLM_TRANSFORM + ".weight" in self._stored:
            # The decoder is tied to the word embeddings unless it has weights of its own, and its
            # bias was written under the head's own name before it was the decoder's.
            self._stored.setdefault(f"{MLM_DECODER}.weight", self._stored[WORDS])
            self._stored.setdefault(f"{MLM_DECODER}.bias", self._stored.get(f"{MLM}.bias", ""))
        self._check(shape)

    @property
    def has_vocabulary(self) -> bool:
        """Whether the head that predicts words is there."""
        return f"{MLM_DECODER}.weight" in self._stored

    def __getitem__(self, name: str) -> Floats:
        array = self._file[self._stored[name]]
        return array if array.dtype == np.float32 else array.astype(np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def _check(self, shape: BertShape) -> None:
        wanted = expected(shape) | (expected_vocabulary(shape) if self.has_vocabulary else {})
        for name, want in wanted.items():
            if not self._stored.get(name):
                raise ModelUnavailable(f"{self._file.path} lacks {name}")
            got = self._file[self._stored[name]].shape
            if got != want:
                raise ModelUnavailable(f"{self._file.path}: {name} is {got}, config.json: {want}")


def _canonical(stored: str) -> str:
    name = stored.removeprefix("bert.")
    if name.endswith("LayerNorm.gamma"):
        return name.removesuffix("gamma") + "weight"
    return name.removesuffix("beta") + "bias" if name.endswith("LayerNorm.beta") else name


def layer_matrices(shape: BertShape, layer: int) -> dict[str, tuple[int, int]]:
    """Name (without `.weight`) -> [out, in] of the linear maps of one layer."""
    at = f"encoder.layer.{layer}"
    square = (shape.hidden, shape.hidden)
    return {
        f"{at}.attention.self.query": square,
        f"{at}.attention.self.key": square,
        f"{at}.attention.self.value": square,
        f"{at}.attention.output.dense": square,
        f"{at}.intermediate.dense": (shape.intermediate, shape.hidden),
        f"{at}.output.dense": (shape.hidden, shape.intermediate),
    }


def expected(shape: BertShape) -> dict[str, tuple[int, ...]]:
    """Canonical names and shapes of the tensors that every checkpoint of `shape` must have."""
    wide = (shape.hidden,)
    tensors: dict[str, tuple[int, ...]] = {
        WORDS: (shape.vocab, shape.hidden),
        POSITIONS: (shape.positions, shape.hidden),
        TYPES: (shape.token_types, shape.hidden),
        "embeddings.LayerNorm.weight": wide,
        "embeddings.LayerNorm.bias": wide,
    }
    for layer in range(shape.layers):
        for name, (rows, columns) in layer_matrices(shape, layer).items():
            tensors[f"{name}.weight"] = (rows, columns)
            tensors[f"{name}.bias"] = (rows,)
        for norm in ("attention.output.LayerNorm", "output.LayerNorm"):
            tensors[f"encoder.layer.{layer}.{norm}.weight"] = wide
            tensors[f"encoder.layer.{layer}.{norm}.bias"] = wide
    return tensors


def expected_vocabulary(shape: BertShape) -> dict[str, tuple[int, ...]]:
    """Canonical names and shapes of the masked-language head."""
    wide = (shape.hidden,)
    return {
        f"{MLM_TRANSFORM}.weight": (shape.hidden, shape.hidden),
        f"{MLM_TRANSFORM}.bias": wide,
        f"{MLM_NORM}.weight": wide,
        f"{MLM_NORM}.bias": wide,
        f"{MLM_DECODER}.weight": (shape.vocab, shape.hidden),
        f"{MLM_DECODER}.bias": (shape.vocab,),
    }


def classifier_of(
    weights: BertWeights, shape: BertShape, config: Mapping[str, Any], spec: ModelSpec
) -> Head | None:
    """The classification head of `BertForSequenceClassification`: pooler, tanh, linear.

    None for other architectures. The score's class is the option `positive`, or the second of two.
    """
    if shape.architecture != "BertForSequenceClassification":
        return None
    layers = []
    for name in (POOLER, CLASSIFIER):
        if f"{name}.weight" not in weights or f"{name}.bias" not in weights:
            raise ModelUnavailable(f"{spec.key}: the checkpoint lacks {name}")
        layers.append((as_float32(weights[f"{name}.weight"]), as_float32(weights[f"{name}.bias"])))
    labels = called(labels_of(config, len(layers[-1][1])), spec.labels, spec.key)
    independent = config.get("problem_type") == "multi_label_classification"
    return Head(
        tuple(layers), labels, "tanh", positive=positive_of(labels, spec), independent=independent
    )


def token_classifier_of(weights: BertWeights, shape: BertShape) -> tuple[Floats, Floats] | None:
    """Weight [k, d] and bias [k] of `BertForTokenClassification`; None for other architectures."""
    if shape.architecture != "BertForTokenClassification":
        return None
    if f"{CLASSIFIER}.weight" not in weights or f"{CLASSIFIER}.bias" not in weights:
        raise ModelUnavailable(f"the checkpoint lacks {CLASSIFIER}")
    return as_float32(weights[f"{CLASSIFIER}.weight"]), as_float32(weights[f"{CLASSIFIER}.bias"])


def labels_of(config: Mapping[str, Any], n: int) -> tuple[str, ...]:
    """The n class names of a `config.json`, in the order of the logits; `LABEL_<i>` where none."""
    named = config.get("id2label") or {}
    return tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(n))


def positive_of(labels: Sequence[str], spec: ModelSpec) -> int | None:
    """Index of the class whose probability is a score: option `positive`, or the second of two."""
    positive = spec.options.get("positive")
    if positive is None:
        return 1 if len(labels) == 2 else None
    if positive not in labels:
        raise ModelUnavailable(f"{spec.key}: option positive is none of {', '.join(labels)}")
    return labels.index(str(positive))
