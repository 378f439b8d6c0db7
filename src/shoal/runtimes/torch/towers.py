"""Heads over each token vector: dense, activation, norm, out.

Token classifiers and masked-language models have one. Owns reading and running it, and the
activations by name. Does not own which names it has in a checkpoint (`families`), nor heads over
one pooled vector, which are numpy (`classifiers`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from shoal.runtimes.torch.linear import Linear
from shoal.runtimes.torch.shape import HeadNames, Shape
from shoal.runtimes.torch.tensors import Pair, Tensors

_tanh_gelu = partial(functional.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
    "tanh": torch.tanh,
}


def normed(x: Tensor, pair: Pair, shape: Shape) -> Tensor:
    """Float32: a layer norm (Ba et al. 2016) or RMS norm (Zhang & Sennrich 2019), last axis."""
    x = x.float()
    if shape.norm == "layer":
        size = pair.weight.shape
        return functional.layer_norm(x, size, pair.weight, pair.bias, shape.norm_eps)
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + shape.norm_eps)
    return scaled * pair.weight


class Tower:
    """One head with n outputs for each token vector."""

    def __init__(
        self, tensors: Tensors, names: HeadNames, n: int, shape: Shape, words: str = ""
    ) -> None:
        wide = shape.hidden
        self._shape = shape
        self._act = ACTIVATIONS[names.activation]
        self._dense = tensors.pair(names.dense, wide, wide) if names.dense else None
        self._norm = tensors.norm(names.norm, wide) if names.norm else None
        if names.tied and names.out not in tensors:
            # Tied to the word table; the bias is the head's own.
            weight = tensors.table(words, n, wide)
            bias = tensors.vector(names.bias or f"{names.out.stored}.bias", n)
            self.out = Pair(weight, bias if names.out.bias else None)
        else:
            self.out = tensors.pair(names.out, n, wide, bias=names.bias)

    def features(self, x: Tensor, linear: Linear) -> Tensor:
        """What the last map reads, [tokens, d]."""
        if self._dense is not None:
            x = self._act(linear.apply(x.to(self._dense.weight.dtype), *self._dense))
        return x if self._norm is None else normed(x, self._norm, self._shape)
