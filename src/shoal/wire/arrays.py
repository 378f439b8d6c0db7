"""Arrays on the wire: one little-endian block with its dtype and shape.

Owns the layout and its checks. Free of numpy on purpose, so that the gateway can join, slice and
forward arrays without loading it; numpy users call `Array.of` and `numpy.frombuffer`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from shoal.errors import Bug

ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint16": 2,
}


class Array(msgspec.Struct, frozen=True):
    """A dense array: `dtype` is a numpy name, `data` is little-endian and C-ordered."""

    dtype: str
    shape: list[int]
    data: bytes

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        want = math.prod(self.shape) * ITEM_BYTES[self.dtype]
        if len(self.data) != want:
            raise ValueError(f"{self.dtype}{self.shape} needs {want} bytes, not {len(self.data)}")

    @classmethod
    def of(cls, array: Any) -> Array:
        """The wire form of a numpy array (any object with dtype, shape, tobytes and astype)."""
        dtype = str(array.dtype.newbyteorder("=").name)
        return cls(dtype, list(array.shape), array.astype(array.dtype.newbyteorder("<")).tobytes())

    def rows(self) -> list[bytes]:
        """The blocks of the entries along the first axis."""
        if not self.shape:
            raise Bug("a scalar array has no rows")
        step = len(self.data) // self.shape[0] if self.shape[0] else 0
        return [self.data[i * step : (i + 1) * step] for i in range(self.shape[0])]


def concat(parts: Sequence[Array]) -> Array:
    """Joins arrays along the first axis; dtypes and the other axes must agree."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(p.dtype != first.dtype or p.shape[1:] != first.shape[1:] for p in parts):
        raise Bug(f"arrays of different kinds: {[(p.dtype, p.shape) for p in parts]}")
    shape = [sum(p.shape[0] for p in parts), *first.shape[1:]]
    return Array(first.dtype, shape, b"".join(p.data for p in parts))
