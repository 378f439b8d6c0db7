"""What is done with vectors after a network has made them. Numpy, float32 until the last step.

Owns length 1, shorter vectors, the number formats of answers, and late interaction. Does not own
pooling (`pooling`) or networks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import InvalidRequest

Floats = npt.NDArray[np.float32]

_TINY = np.float32(1e-12)
_INT8_MAX = 127


def normalized(vectors: Floats) -> Floats:
    """Vectors [n, d] scaled to length 1; a zero vector stays one."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: Floats = vectors / np.maximum(lengths, _TINY)
    return unit


def leading(vectors: Floats, dimensions: int | None, where: str) -> Floats:
    """The first dimensions of vectors [n, d]; None for all. Raises `InvalidRequest`."""
    if dimensions is None:
        return vectors
    if not 1 <= dimensions <= vectors.shape[1]:
        raise InvalidRequest(
            f"{where} gives 1 to {vectors.shape[1]} dimensions", param="dimensions"
        )
    return vectors[:, :dimensions]


def as_dtype(vectors: Floats, dtype: str) -> npt.NDArray[Any]:
    """Vectors [n, d] in the number format of an answer.

    float32 and float16 are what they say. int8 scales each vector apart, so that its number
    farthest from zero is 127 or -127: directions, and so cosines, stay what they were up to the
    rounding, and a vector of length 1 is had back by scaling to length 1. binary keeps signs: a bit
    is 1 where a number is above zero, eight to a byte, the first the highest, uint8 [n, ceil(d/8)].
    Raises `InvalidRequest` where a number is too large for float16.
    """
    if dtype == "int8":
        largest = np.abs(vectors).max(axis=1, keepdims=True, initial=0)
        small: npt.NDArray[np.int8] = np.rint(
            vectors * (_INT8_MAX / np.maximum(largest, _TINY))
        ).astype(np.int8)
        return small
    if dtype == "binary":
        return np.packbits(vectors > 0, axis=1)
    if dtype == "float16":
        if vectors.size and np.abs(vectors).max() > np.finfo(np.float16).max:
            raise InvalidRequest("a number is too large for float16", param="dtype")
        return vectors.astype(np.float16)
    return np.ascontiguousarray(vectors)


def maxsim(query: Floats, document: Floats) -> float:
    """Late interaction: the sum over query tokens of their largest product with a document token.

    Both are token vectors of length 1, [q, d] and [t, d]. Equation 3 of Khattab and Zaharia 2020
    (ColBERT).
    """
    return float((query @ document.T).max(axis=1).sum())
