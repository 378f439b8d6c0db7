"""Tensors out of a torch checkpoint, without torch and without running what a pickle asks for.

`torch.save` writes a zip: a pickle of the containers, and one member of raw bytes per storage. The
unpickler here knows three things (rebuild a tensor, an ordered dictionary, a type of storage) and
refuses every other name, so a hostile file can at most fail to load. Owns that format. Does not
decide whether a file may be read: the catalog entry does, by `allow_pickle`.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.errors import ModelUnavailable

MAX_PICKLE_BYTES = 16 * 1024 * 1024
MAX_STORAGE_BYTES = 2 * 1024**3
MAX_DEPTH = 8
# bfloat16 is widened by hand: numpy has none.
STORAGES = {
    "BFloat16Storage": "<u2",
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "<i1",
    "ByteStorage": "<u1",
    "BoolStorage": "?",
}


# A damaged pickle ends in any of these; none of them says more than that.
DAMAGED = (
    OSError,
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class _Tensor(NamedTuple):
    """A tensor inside the pickle: a tuple, so that a pickle cannot give it another state."""

    array: npt.NDArray[Any]


class Refused(pickle.UnpicklingError):
    """The pickle asks for something that is not needed to hold tensors."""


class TensorUnpickler(pickle.Unpickler):
    """Builds dictionaries of tensors; every other name in the pickle is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """The three things that tensors need, by the names that torch gives them."""
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *arguments: rebuild(*arguments[:4])
        if module == "torch" and name in STORAGES:
            return name
        raise Refused(f"it names {module}.{name}, which no tensor needs")


class _Unpickler(TensorUnpickler):
    """That of a zip, where each storage is a member."""

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(archive.open(f"{root}data.pkl"), encoding="utf-8")
        self._archive = archive
        self._root = root

    def persistent_load(self, pid: Any) -> npt.NDArray[Any]:
        kind, storage, key, _, _ = pid
        if kind != "storage" or storage not in STORAGES:
            raise Refused(f"it refers to a {kind} of type {storage}")
        info = self._archive.getinfo(f"{self._root}data/{key}")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > MAX_STORAGE_BYTES:
            raise Refused(f"its storage {key} is compressed or over {MAX_STORAGE_BYTES} bytes")
        return numbers(self._archive.read(info), storage)


def numbers(data: bytes, storage: str) -> npt.NDArray[Any]:
    """What lies in a storage of that type, bfloat16 as float32."""
    read = np.frombuffer(data, STORAGES[storage])
    return widened(read) if storage == "BFloat16Storage" else read


def widened(bfloat16: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Bits of bfloat16 as the float32 numbers that they are."""
    return (bfloat16.astype(np.uint32) << np.uint32(16)).view(np.float32)


def rebuild(storage: Any, offset: int, shape: Any, strides: Any) -> _Tensor:
    """The view of a storage that a tensor is, as a copy; places outside the storage are refused."""
    if not isinstance(storage, np.ndarray) or len(shape) != len(strides):
        raise Refused("a tensor is malformed")
    if math.prod(shape):
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if min(offset, *strides, *shape, 0) < 0 or last >= storage.size:
            raise Refused("a tensor lies outside its storage")
    if math.prod(shape) > storage.size:
        raise Refused("a tensor is larger than its storage")
    view = np.lib.stride_tricks.as_strided(
        storage[offset:], shape, [step * storage.itemsize for step in strides]
    )
    return _Tensor(view.copy())


def read(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a checkpoint: nested names joined by dots, anything else left out.

    Raises `ModelUnavailable` for a file that is none, is damaged, or asks to run code.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(pickles) != 1 or archive.getinfo(pickles[0]).file_size > MAX_PICKLE_BYTES:
                raise Refused("it has no data.pkl of sensible size")
            root = pickles[0].removesuffix("data.pkl")
            if f"{root}byteorder" in archive.namelist():
                order = archive.read(f"{root}byteorder")
                if order != b"little":
                    raise Refused(f"its byte order is {order!r}")
            loaded = _Unpickler(archive, root).load()
    except (*DAMAGED, zipfile.BadZipFile) as error:
        raise ModelUnavailable(f"{path} is no torch checkpoint of tensors: {error}") from error
    return dict(flatten(loaded, "", MAX_DEPTH))


def flatten(value: Any, name: str, depth: int) -> list[tuple[str, npt.NDArray[Any]]]:
    """Names and arrays of nested dictionaries of tensors; anything else is left out."""
    if isinstance(value, _Tensor):
        return [(name, value.array)]
    if not isinstance(value, dict) or not depth:
        return []
    at = f"{name}." if name else ""
    return [
        found for key, inner in value.items() for found in flatten(inner, f"{at}{key}", depth - 1)
    ]
