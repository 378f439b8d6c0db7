"""Weights in files: named arrays, never code.

Owns reading safetensors files (memory-mapped: nothing is copied that is float32 already), alone or
as an index lists several, and the choice of reader for a file. Torch's own formats are read by
`torch_zip` and `torch_legacy`, only where the catalog allows pickles. Does not own what the names
mean (`bert`, `heads`).
"""

from __future__ import annotations

import json
import math
import mmap
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import ModelUnavailable
from shoal.ipc.messages import ModelSpec
from shoal.runtimes import torch_legacy, torch_zip

Weights = npt.NDArray[Any]

INDEX = ".safetensors.index.json"
MAX_HEADER_BYTES = 64 * 1024 * 1024
_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",  # widened to float32 by hand, numpy has no bfloat16
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "<i1",
    "U8": "<u1",
    "BOOL": "?",
}


class SafetensorsFile(Mapping[str, Weights]):
    """A safetensors file as a mapping of names to arrays.

    Arrays lie on the mapped file (copy-on-write, so the file never changes) and keep it open.
    float16 and bfloat16 come widened to float32, as copies. Raises `ModelUnavailable` when the
    file is no safetensors file, is cut short, or holds a type that numpy cannot give.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries = read_header(path)
        with path.open("rb") as file:
            self._pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._map = np.frombuffer(self._pages, np.uint8)

    def __getitem__(self, name: str) -> Weights:
        dtype, shape, start, end = self._entries[name]
        array = self._map[start:end].view(_DTYPES[dtype]).reshape(shape)
        if dtype == "BF16":
            return torch_zip.widened(array)
        return array.astype(np.float32) if dtype == "F16" else array

    def release_pages(self) -> None:
        """Gives back the memory of pages that were read; they are read again when touched."""
        if hasattr(self._pages, "madvise"):
            self._pages.madvise(mmap.MADV_DONTNEED)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def read_header(path: Path) -> dict[str, tuple[str, list[int], int, int]]:
    """Name -> (type, shape, first byte, end byte) of each tensor of a safetensors file."""
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size_bytes - 8):
                raise ModelUnavailable(f"{path} is no safetensors file, or it is cut short")
            header = json.loads(file.read(header_bytes))
        data_at = 8 + header_bytes
        return {
            name: _checked(path, name, entry, data_at, size_bytes)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ModelUnavailable(f"{path} cannot be read as safetensors: {error}") from error


def _checked(
    path: Path, name: str, entry: Any, data_at: int, size_bytes: int
) -> tuple[str, list[int], int, int]:
    try:
        dtype, shape = str(entry["dtype"]), [int(n) for n in entry["shape"]]
        start, end = (data_at + int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelUnavailable(f"{path}: the entry of {name} is malformed") from error
    if dtype not in _DTYPES:
        raise ModelUnavailable(f"{path}: {name} has type {dtype}, which is not supported")
    want_bytes = math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize
    if (
        min(shape, default=0) < 0
        or not data_at <= start <= end <= size_bytes
        or end - start != want_bytes
    ):
        raise ModelUnavailable(f"{path} is cut short or damaged: {name} does not lie within it")
    return dtype, shape, start, end


def locate(spec: ModelSpec, usual: Sequence[str]) -> Path:
    """The weights file of a model: the one that the spec names, or the first of `usual`.

    Raises `ModelUnavailable` when it is not there.
    """
    path = Path(spec.path)
    if path.is_file():
        return path
    names = [spec.weights] if spec.weights is not None else usual
    for name in names:
        if (path / name).is_file():
            return path / name
    raise ModelUnavailable(f"{spec.key}: {path} holds no {' or '.join(names)}")


class ShardedFile(Mapping[str, Weights]):
    """Several safetensors files as one mapping, as their index file lists them.

    Raises `ModelUnavailable` when the index is damaged, or names a place outside its own folder.
    """

    def __init__(self, index: Path) -> None:
        self.path = index
        try:
            places = json.loads(index.read_text("utf-8"))["weight_map"]
            self._places = {str(name): str(place) for name, place in places.items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ModelUnavailable(f"{index} cannot be read as an index: {error}") from error
        self._files: dict[str, SafetensorsFile] = {}
        for place in sorted(set(self._places.values())):
            if Path(place).name != place or not (index.parent / place).is_file():
                raise ModelUnavailable(f"{index} names {place}, which is no file beside it")
            self._files[place] = SafetensorsFile(index.parent / place)
        for name, place in self._places.items():
            if name not in self._files[place]:
                raise ModelUnavailable(f"{index}: {place} lacks {name}")

    def __getitem__(self, name: str) -> Weights:
        return self._files[self._places[name]][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def read_weights(path: Path, *, allow_pickle: bool) -> Mapping[str, Weights]:
    """The named arrays of a safetensors file, of an index of several, or of a torch checkpoint.

    The last only with allow_pickle. Raises `ModelUnavailable` for a file of any other kind.
    """
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    if path.name.endswith(INDEX):
        return ShardedFile(path)
    if not allow_pickle:
        raise ModelUnavailable(
            f"{path} is no safetensors file; a torch checkpoint needs allow_pickle in the catalog"
        )
    return torch_zip.read(path) if zipfile.is_zipfile(path) else torch_legacy.read(path)
