"""The tensors of a checkpoint by the network's own names, checked, on a device, in a precision.

Owns finding each part in the file (prefixes, the old names of a norm's tensors, blocks of fused
matrices), checking its shape against `config.json`, counting bytes, and what torch's errors are
to us. On the CPU in float32 the
tensors lie on the mapped file itself: nothing is copied, and processes that load the same
checkpoint share its pages. Does not own what is computed with them (`network`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ModelUnavailable, OutOfMemory, RunFailed
from shoal.runtimes.checkpoint import Weights
from shoal.runtimes.torch.shape import Part

PRECISIONS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Pair(NamedTuple):
    """Weight and bias of a linear map or a norm."""

    weight: Tensor
    bias: Tensor | None


class Tensors:
    """Reads parts of one checkpoint. `nbytes` counts what was read, shared tensors once."""

    def __init__(
        self,
        file: Mapping[str, Weights],
        prefixes: tuple[str, ...],
        *,
        where: str,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._file = file
        self._where = where
        self._device = device
        self._dtype = dtype
        self._stored = {canonical(name, prefixes): name for name in file}
        self._read: dict[tuple[str, tuple[int, int], torch.dtype], Tensor] = {}

    def __contains__(self, part: object) -> bool:
        return isinstance(part, Part) and f"{part.stored}.weight" in self._stored

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that were read."""
        return sum(tensor.nbytes for tensor in self._read.values())

    def table(self, stored: str, rows: int, width: int) -> Tensor:
        """A matrix [rows, width] that is looked up."""
        return self._tensor(f"{stored}.weight", (rows, width))

    def pair(self, part: Part, *shape: int, bias: str = "") -> Pair:
        """Weight of that shape and bias [shape[0]] of a part. `bias` names another bias."""
        weight = self._tensor(f"{part.stored}.weight", shape, part.block)
        if not part.bias:
            return Pair(weight, None)
        beside = f"{part.stored}.bias"
        name = beside if beside in self._stored or not bias else bias
        return Pair(weight, self._tensor(name, shape[:1], part.block))

    def norm(self, part: Part, size: int) -> Pair:
        """Weight and bias [size] of a norm, float32 whatever the precision of the maps is."""
        weight = self._tensor(f"{part.stored}.weight", (size,), dtype=torch.float32)
        if not part.bias:
            return Pair(weight, None)
        return Pair(weight, self._tensor(f"{part.stored}.bias", (size,), dtype=torch.float32))

    def vector(self, name: str, size: int) -> Tensor:
        """A tensor [size] by its whole name."""
        return self._tensor(name, (size,))

    def array(self, name: str) -> Weights:
        """A tensor as numpy has it, unchecked; raises `ModelUnavailable` when it is not there."""
        if name not in self._stored:
            raise ModelUnavailable(f"{self._where}: the checkpoint lacks {name}")
        return self._file[self._stored[name]]

    def _tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        block: tuple[int, int] = (0, 1),
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        dtype = dtype or self._dtype
        key = (name, block, dtype)
        if key not in self._read:
            array = self.array(name)
            k, n = block
            want = (shape[0] * n, *shape[1:])
            if array.shape != want:
                raise ModelUnavailable(
                    f"{self._where}: {name} is {array.shape}, config.json: {want}"
                )
            mine = array[k * shape[0] : (k + 1) * shape[0]]
            if mine.dtype != np.float32:
                mine = mine.astype(np.float32)
            self._read[key] = torch.from_numpy(mine).to(self._device, dtype)
        return self._read[key]


def canonical(stored: str, prefixes: tuple[str, ...]) -> str:
    """A stored name without what a checkpoint may put first, and with a norm's present names."""
    name = stored
    for prefix in prefixes:
        name = name.removeprefix(prefix)
    if name.endswith("LayerNorm.gamma"):
        return name.removesuffix("gamma") + "weight"
    return name.removesuffix("beta") + "bias" if name.endswith("LayerNorm.beta") else name


@contextmanager
def mapped_errors(where: str) -> Iterator[None]:
    """Turns torch's errors into ours; its CPU allocator has no class of error of its own."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise OutOfMemory(f"{where}: no memory left on the device") from error
        raise RunFailed(f"{where}: {error}") from error
