"""Numbers for an answer: the one place where the gateway looks into arrays.

Owns the expansion of float blocks for JSON, base64, and cutting a result into one part per input.
numpy and orjson are loaded when the first answer needs them: an OpenAI client asks for base64,
which needs neither. Does not own the shape of any answer (the routes).
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import msgspec

from shoal.errors import Bug
from shoal.gateway.forms import JSON, Form
from shoal.wire.arrays import Array
from shoal.wire.envelope import Result

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Text:
    """An answer that is neither JSON nor MessagePack."""

    content_type: bytes
    body: str


def in_places(rows: Sequence[T], failed: Collection[int]) -> list[T | None]:
    """Rows of the inputs that are well, each in its input's place, None in that of the others."""
    left = iter(rows)
    return [None if at in failed else next(left) for at in range(len(rows) + len(failed))]


def numbers(array: Array, form: Form) -> Any:
    """An array as an encoder takes it: nested JSON lists, or the block itself in MessagePack.

    float32 is written with the shortest decimals that read back as the same float32.
    """
    return msgspec.Raw(_json(array)) if form is JSON else array


def floats(array: Array) -> list[Any]:
    """An array as Python floats that print as the shortest decimals of its float32."""
    values: list[Any] = msgspec.json.decode(_json(array))
    return values


def base64(row: bytes, form: Form) -> Any:
    """A row of little-endian float32 as the OpenAI clients read it.

    For JSON it is spliced in as it is: there is nothing in base64 that an encoder must escape.
    """
    text = b2a_base64(row, newline=False)
    return msgspec.Raw(b'"%b"' % text) if form is JSON else text.decode("ascii")


def array_of(result: Result, name: str) -> Array:
    """An array that the result must have."""
    array = result.arrays.get(name)
    if array is None:
        raise Bug(f"the worker's answer has no `{name}`, only {sorted(result.arrays)}")
    return array


def dense_rows(result: Result) -> list[bytes]:
    """The float32 block of each input's dense vector."""
    dense = array_of(result, "dense")
    if dense.dtype != "float32" or len(dense.shape) != 2:
        raise Bug(f"dense vectors came as {dense.dtype}{dense.shape}")
    return dense.rows()


def token_rows(result: Result) -> list[Array]:
    """The token vectors of each input: [tokens, d]."""
    block = array_of(result, "multivector")
    counts = memoryview(array_of(result, "multivector_counts").data).cast("I")
    if len(block.shape) != 2 or sum(counts) != block.shape[0]:
        raise Bug(f"token vectors came as {block.dtype}{block.shape} for {sum(counts)} tokens")
    step = len(block.data) // block.shape[0] if block.shape[0] else 0
    return [
        Array(block.dtype, [end - start, block.shape[1]], block.data[start * step : end * step])
        for start, end in pairwise(accumulate(counts, initial=0))
    ]


def sparse_rows(result: Result) -> Iterator[tuple[Array, Array]]:
    """Indices (uint32) and values (float32) of each input's sparse vector."""
    counts = memoryview(array_of(result, "sparse_counts").data).cast("I")
    indices = array_of(result, "sparse_indices").data
    values = array_of(result, "sparse_values").data
    for start, end in pairwise(accumulate(counts, initial=0)):
        shape = [end - start]
        yield (
            Array("uint32", shape, indices[4 * start : 4 * end]),
            Array("float32", shape, values[4 * start : 4 * end]),
        )


def _json(array: Array) -> bytes:
    import numpy as np
    import orjson

    dtype = np.dtype(array.dtype).newbyteorder("<")
    block = np.frombuffer(array.data, dtype).reshape(array.shape)
    return orjson.dumps(block, option=orjson.OPT_SERIALIZE_NUMPY)
