"""Small networks over pooled vectors, and how logits become scores. Numpy, float32.

Owns `Head` (its weights, features and labels), the names of classes, softmax, and the score of one
class: its probability, with the margin that orders without saturating. Does not own pooling or
files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from shoal.core.spelling import did_you_mean
from shoal.errors import InvalidRequest, ModelUnavailable
from shoal.ipc.messages import HeadSpec
from shoal.runtimes.checkpoint import Weights, read_weights

Floats = npt.NDArray[np.float32]
Layer = tuple[Floats, Floats]

_UNNAMED = re.compile(r"LABEL_\d+")
_erf = np.vectorize(math.erf, otypes=[np.float32])


@dataclass(frozen=True, slots=True)
class Head:
    """Linear layers (weight [out, in], bias [out]) with an activation between them.

    pair: it reads [a; b; |a-b|; a*b] of two vectors, else one vector. positive: index of the class
    whose probability is the score. independent: classes do not exclude each other (sigmoids).
    pooling: which vector of a sequence a network's own classifier reads. norm: a layer norm after
    each activation. No layers at all: the vectors are logits already.
    """

    layers: tuple[Layer, ...]
    labels: tuple[str, ...]
    activation: str = "relu"
    pair: bool = False
    positive: int | None = None
    independent: bool = False
    pooling: Literal["cls", "mean", "last"] = "cls"
    norm: Layer | None = None
    norm_eps: float = 1e-12

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(weight.nbytes + bias.nbytes for weight, bias in self.layers)

    def logits(self, first: Floats, second: Floats | None = None) -> Floats:
        """Logits float32 [n, k] of vectors [n, d]; a pair head needs `second` [n, d] as well."""
        x = first
        if second is not None:
            x = np.concatenate([first, second, np.abs(first - second), first * second], axis=1)
        for at, (weight, bias) in enumerate(self.layers):
            if at:
                x = _activated(x, self.activation)
                x = x if self.norm is None else _normed(x, self.norm, self.norm_eps)
            x = x @ weight.T + bias
        return x

    def check(self, dim: int, where: str) -> None:
        """Raises `ModelUnavailable` when the head does not read vectors of length `dim`."""
        if self.layers:
            wide = self.layers[0][0].shape[1]
            want = 4 * dim if self.pair else dim
            if wide != want:
                raise ModelUnavailable(f"{where}: the head reads {wide} numbers, not {want}")


def load_head(spec: HeadSpec, folder: Path, where: str) -> Head:
    """Reads a head's weights. Raises `ModelUnavailable` when they do not fit the spec."""
    layers = _stack(read_weights(folder / spec.file, allow_pickle=spec.allow_pickle), spec, where)
    if len(layers[-1][1]) != len(spec.labels):
        raise ModelUnavailable(
            f"{where}: the head has {len(layers[-1][1])} classes, {len(spec.labels)} are named"
        )
    if spec.positive is not None and spec.positive not in spec.labels:
        raise ModelUnavailable(f"{where}: {spec.positive!r} is not one of the head's labels")
    positive = None if spec.positive is None else spec.labels.index(spec.positive)
    return Head(layers, tuple(spec.labels), spec.activation, spec.kind == "pair", positive)


def _stack(weights: Mapping[str, Weights], spec: HeadSpec, where: str) -> tuple[Layer, ...]:
    """The linear layers `<prefix>net.<n>`, in the order of n."""
    pattern = re.compile(re.escape(spec.prefix) + r"net\.(\d+)\.weight")
    found = sorted(int(match[1]) for name in weights if (match := pattern.fullmatch(name)))
    layers: list[Layer] = []
    for n in found:
        name = f"{spec.prefix}net.{n}"
        if f"{name}.bias" not in weights:
            raise ModelUnavailable(f"{where}: {spec.file} lacks {name}.bias")
        layer = (as_float32(weights[f"{name}.weight"]), as_float32(weights[f"{name}.bias"]))
        wide = layers[-1][0].shape[0] if layers else layer[0].shape[-1]
        if layer[0].shape != (len(layer[1]), wide):
            raise ModelUnavailable(f"{where}: {name} of {spec.file} does not fit its neighbours")
        layers.append(layer)
    if not layers:
        raise ModelUnavailable(f"{where}: {spec.file} holds no {spec.prefix}net.<n>.weight")
    return tuple(layers)


def as_float32(array: Weights) -> Floats:
    """A float32 copy that no longer depends on the file it came from."""
    return np.array(array, np.float32)


def _activated(x: Floats, kind: str) -> Floats:
    if kind == "tanh":
        return np.tanh(x)
    if kind == "gelu":
        gelu: Floats = x * np.float32(0.5) * (1 + _erf(x / np.float32(math.sqrt(2))))
        return gelu
    return np.maximum(x, np.float32(0))


def _normed(x: Floats, norm: Layer, eps: float) -> Floats:
    """A layer norm (Ba et al. 2016) of each row."""
    centred = x - x.mean(axis=1, keepdims=True)
    spread = np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + np.float32(eps))
    scaled: Floats = centred / spread * norm[0] + norm[1]
    return scaled


def called(found: Sequence[str], named: Sequence[str], where: str) -> tuple[str, ...]:
    """The names of a network's classes: its files' own, or those of the entry where it has none.

    Raises `ModelUnavailable` where the entry names another number of them.
    """
    own = not all(_UNNAMED.fullmatch(name) for name in found)
    if own or not named:
        return tuple(found)
    if found and len(named) != len(found):
        raise ModelUnavailable(f"{where}: {len(named)} labels are named for {len(found)} classes")
    return tuple(named)


def among(wanted: Collection[str], known: Sequence[str]) -> list[int]:
    """Indices of the wanted labels, in the order of `known`. Raises `InvalidRequest`."""
    for label in wanted:
        if label not in known:
            raise InvalidRequest(
                f"there is no label `{label}`{did_you_mean(label, known)}; "
                f"known: {', '.join(known)}",
                param="labels",
            )
    return [index for index, label in enumerate(known) if label in wanted]


def softmax(logits: Floats) -> Floats:
    """Probabilities of classes that exclude each other, float32 [n, k]."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: Floats = powers / powers.sum(axis=1, keepdims=True)
    return shares


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)), without overflow on either side; float32 of any shape."""
    small = np.exp(-np.abs(x))
    probabilities: Floats = np.where(x >= 0, np.float32(1), small) / (1 + small)
    return probabilities


def margin(logits: Floats, positive: int) -> Floats:
    """How far one class is ahead, float32 [n]: its logit minus logsumexp of the others.

    The sigmoid of it is the softmax probability of the class; the margin itself goes on growing
    where the probability has rounded to 1. One column alone is its own margin.
    """
    ahead = logits[:, positive]
    others = np.delete(logits, positive, axis=1)
    if others.shape[1]:
        top = others.max(axis=1)
        ahead = ahead - top - np.log(np.exp(others - top[:, None]).sum(axis=1))
    return ahead
