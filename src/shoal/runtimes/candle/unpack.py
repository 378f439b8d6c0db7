"""A GGUF file of packed weights as one of plain weights.

    python -m shoal.runtimes.candle.unpack FILE FOLDER FORM

What an engine computes of weights of four or eight bits depends on the processor, for it rounds
what they are multiplied by as well, and each processor's kernels do so in another way; a small
model's likeliest word may hang on that. Of plain weights it computes in float32. Owns writing the
new file: the head as it was, and each tensor of several dimensions in the form that is asked for.
Does not own the place of the result (`unpacked`) or the packings (the library `gguf`).
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from shoal.errors import ModelUnavailable
from shoal.runtimes.candle.gguf import Head, Tensor, read_head

# The form of a tensor, by its name in an entry: the format's number of it, and numpy's name.
FORMS = {"float32": (0, "<f4"), "float16": (1, "<f2")}
WEIGHTS = "model.gguf"
MODULE = "shoal.runtimes.candle.unpack"


def main(file: Path, folder: Path, form: str) -> None:
    """Writes `model.gguf` into the folder. Raises `ModelUnavailable` for what is no whole GGUF."""
    head = read_head(file)
    kinds = [_kind(tensor, form) for tensor in head.tensors]
    with file.open("rb") as old, (folder / WEIGHTS).open("wb") as new:
        new.write(old.read(head.fields_end))
        new.write(b"".join(_infos(head, kinds)))
        for tensor, (_, dtype) in zip(head.tensors, kinds, strict=True):
            _align(new, head.alignment_bytes)
            new.write(_values(file, old, head, tensor).astype(dtype).tobytes())


def _kind(tensor: Tensor, form: str) -> tuple[int, str]:
    """Norms and biases, which are small, stay in float32."""
    return FORMS[form if len(tensor.shape) > 1 else "float32"]


def _infos(head: Head, kinds: list[tuple[int, str]]) -> Iterator[bytes]:
    """Where each tensor will lie, one after the other."""
    start = 0
    for tensor, (kind, dtype) in zip(head.tensors, kinds, strict=True):
        name, dimensions = tensor.name.encode(), len(tensor.shape)
        layout = f"<Q{len(name)}sI{dimensions}QIQ"
        yield struct.pack(layout, len(name), name, dimensions, *tensor.shape, kind, start)
        size_bytes = math.prod(tensor.shape) * np.dtype(dtype).itemsize
        start += -(-size_bytes // head.alignment_bytes) * head.alignment_bytes


def _align(file: IO[bytes], alignment_bytes: int) -> None:
    file.write(bytes(-file.tell() % alignment_bytes))


def _values(path: Path, file: IO[bytes], head: Head, tensor: Tensor) -> npt.NDArray[Any]:
    """The numbers of a tensor, in any shape. Raises `ModelUnavailable`."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        kind = GGMLQuantizationType(tensor.kind)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = tensor.shape[0] // block * block_bytes
        start, size_bytes = head.data_start + tensor.start, row_bytes * math.prod(tensor.shape[1:])
        if start + size_bytes > path.stat().st_size:
            raise ModelUnavailable(f"{path} is cut short: {tensor.name} does not lie within it")
        file.seek(start)
        packed = np.frombuffer(file.read(size_bytes), np.uint8).reshape(-1, row_bytes)
        values: npt.NDArray[Any] = dequantize(packed, kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ModelUnavailable(f"{path}: {tensor.name} cannot be unpacked: {error}") from error
    return values


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
