"""EfficientNet (Tan & Le 2019) and its lite kinds, in plain torch: pixels in, a vector of each out.

The checkpoint has no config: channels, kernels and expansion are read off the tensors' shapes, and
the stages, each with the stride of its first block, are where the channels change. With
squeeze-and-excite blocks it is an EfficientNet and its activation is swish; without, a lite one
with ReLU6. Norms over the batch are folded into the convolutions before them. Owns the computation.
Does not own pictures (`shoal.runtimes.images`) or items (`pictures`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from shoal.errors import ModelUnavailable
from shoal.runtimes.checkpoint import Weights

STRIDES = (1, 2, 2, 2, 1, 2, 1)
_EPS = 1e-3


@dataclass(frozen=True, slots=True)
class Convolution:
    """Weight [out, in / groups, k, k] and bias [out] of a convolution."""

    weight: Tensor
    bias: Tensor
    stride: int = 1
    groups: int = 1

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in, h, w] -> [n, out, h / stride, w / stride], rounded up."""
        kernel = self.weight.shape[-1]
        pads = []
        # As TensorFlow pads: no more than needed, the odd one on the right and at the bottom.
        for size in (x.shape[-1], x.shape[-2]):
            more = max((math.ceil(size / self.stride) - 1) * self.stride + kernel - size, 0)
            pads += [more // 2, more - more // 2]
        padded = functional.pad(x, pads) if any(pads) else x
        mapped: Tensor = functional.conv2d(
            padded, self.weight, self.bias, self.stride, groups=self.groups
        )
        return mapped


@dataclass(frozen=True, slots=True)
class Block:
    """An inverted bottleneck: expand, depthwise, squeeze and excite, project."""

    expand: Convolution | None
    depthwise: Convolution
    squeeze: tuple[Convolution, Convolution] | None
    project: Convolution
    skips: bool


class EfficientNet:
    """One network, float32. Raises `ModelUnavailable` for tensors of another kind of network."""

    def __init__(self, weights: Mapping[str, Weights], *, device: str, where: str) -> None:
        self._weights = weights
        self._where = where
        self._device = torch.device(device)
        self._stem = self._folded("_conv_stem", "_bn0", stride=2)
        self._head = self._folded("_conv_head", "_bn1")
        self._classes = (self._tensor("_fc.weight"), self._tensor("_fc.bias"))
        self._blocks = self._read_blocks()
        lite = all(block.squeeze is None for block in self._blocks)
        self._act: Callable[[Tensor], Tensor] = functional.relu6 if lite else functional.silu
        self.classes, self.dim = self._classes[0].shape
        self.memory_bytes = sum(array.nbytes for array in weights.values())

    def vectors(self, pixels: np.ndarray) -> Tensor:
        """The pooled vector, float32 [n, dim], of pictures float32 [n, h, w, 3]."""
        rows = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
        x = self._act(self._stem(torch.from_numpy(rows).to(self._device)))
        for block in self._blocks:
            x = self._bottleneck(x, block)
        pooled: Tensor = self._act(self._head(x)).mean(dim=(2, 3))
        return pooled

    def logits(self, vectors: Tensor) -> Tensor:
        """Logits [n, classes] of pooled vectors."""
        return functional.linear(vectors, *self._classes)

    def _bottleneck(self, x: Tensor, block: Block) -> Tensor:
        y = x if block.expand is None else self._act(block.expand(x))
        y = self._act(block.depthwise(y))
        if block.squeeze is not None:
            reduce, excite = block.squeeze
            gate = excite(self._act(reduce(y.mean(dim=(2, 3), keepdim=True))))
            y = torch.sigmoid(gate) * y
        y = block.project(y)
        return x + y if block.skips else y

    def _read_blocks(self) -> list[Block]:
        blocks: list[Block] = []
        stage, wide = -1, 0
        channels = len(self._stem.bias)
        while f"_blocks.{len(blocks)}._project_conv.weight" in self._weights:
            at = f"_blocks.{len(blocks)}"
            out = len(self._tensor(f"{at}._project_conv.weight"))
            begins = out != wide
            stage, wide = stage + begins, out
            if stage >= len(STRIDES):
                raise ModelUnavailable(f"{self._where}: an EfficientNet has {len(STRIDES)} stages")
            stride = STRIDES[stage] if begins else 1
            expands = f"{at}._expand_conv.weight" in self._weights
            expand = self._folded(f"{at}._expand_conv", f"{at}._bn0") if expands else None
            groups = len(self._tensor(f"{at}._depthwise_conv.weight"))
            squeeze = None
            if f"{at}._se_reduce.weight" in self._weights:
                squeeze = (self._plain(f"{at}._se_reduce"), self._plain(f"{at}._se_expand"))
            blocks.append(
                Block(
                    expand,
                    self._folded(f"{at}._depthwise_conv", f"{at}._bn1", stride, groups),
                    squeeze,
                    self._folded(f"{at}._project_conv", f"{at}._bn2"),
                    skips=stride == 1 and out == channels,
                )
            )
            channels = out
        return blocks

    def _folded(self, name: str, norm: str, stride: int = 1, groups: int = 1) -> Convolution:
        """A convolution and the batch norm after it (Ioffe & Szegedy 2015) as one."""
        weight = self._tensor(f"{name}.weight")
        scale, shift, mean, variance = (
            self._tensor(f"{norm}.{part}")
            for part in ("weight", "bias", "running_mean", "running_var")
        )
        factor = scale / torch.sqrt(variance + _EPS)
        folded = weight * factor[:, None, None, None]
        return Convolution(folded, shift - mean * factor, stride, groups)

    def _plain(self, name: str) -> Convolution:
        return Convolution(self._tensor(f"{name}.weight"), self._tensor(f"{name}.bias"))

    def _tensor(self, name: str) -> Tensor:
        if name not in self._weights:
            raise ModelUnavailable(f"{self._where}: the checkpoint lacks {name}")
        array = np.asarray(self._weights[name], np.float32)
        tensor: Tensor = torch.from_numpy(array).to(self._device)
        return tensor
