"""Tensors out of a torch checkpoint of before 2020, which was no zip yet.

It is five pickles (a magic number, a version, facts of the machine, the containers, the keys of the
storages), and then each storage: how many numbers, and their bytes. The containers come before the
bytes, so they are built twice: once to learn what storages there are, once with the bytes. Owns
that format; the unpickler is that of `torch_zip`, which refuses whatever no tensor needs. Does not
decide whether a file may be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from shoal.errors import ModelUnavailable
from shoal.runtimes.torch_zip import (
    DAMAGED,
    MAX_DEPTH,
    MAX_PICKLE_BYTES,
    MAX_STORAGE_BYTES,
    STORAGES,
    Refused,
    TensorUnpickler,
    flatten,
    numbers,
)

_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_COUNT_BYTES = 8


class _Unpickler(TensorUnpickler):
    """Storages by their keys: those that are read, else the bare facts of one."""

    def __init__(self, file: BinaryIO, storages: Mapping[str, npt.NDArray[Any]] | None) -> None:
        super().__init__(file, encoding="utf-8")
        self._storages = storages
        self.sizes: dict[str, tuple[str, int]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """As for a zip; before the bytes are there, a tensor is nothing."""
        found = super().find_class(module, name)
        if self._storages is None and module == "torch._utils":
            return lambda *_: None
        return found

    def persistent_load(self, pid: Any) -> Any:
        kind, storage, key, _, count, view = pid
        if kind != "storage" or storage not in STORAGES or view is not None:
            raise Refused(f"it refers to a {kind} of type {storage}")
        if self._storages is not None:
            return self._storages[str(key)]
        self.sizes[str(key)] = (storage, int(count))
        return None


def read(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a checkpoint: nested names joined by dots, anything else left out.

    Raises `ModelUnavailable` for a file that is none, is damaged, or asks to run code.
    """
    try:
        with path.open("rb") as file:
            loaded = _read(file)
    except (*DAMAGED, MemoryError) as error:
        raise ModelUnavailable(f"{path} is no torch checkpoint of tensors: {error}") from error
    return dict(flatten(loaded, "", MAX_DEPTH))


def _read(file: BinaryIO) -> Any:
    if _next(file, None)[0] != _MAGIC or _next(file, None)[0] != _VERSION:
        raise Refused("it begins like none")
    facts, _ = _next(file, None)
    if not facts.get("little_endian", True):
        raise Refused("its byte order is big")
    begins = file.tell()
    _, sizes = _next(file, None)
    keys, _ = _next(file, None)
    if len(keys) != len(sizes) or file.tell() - begins > MAX_PICKLE_BYTES:
        raise Refused("its containers do not fit its storages")
    storages = {str(key): _storage(file, *sizes[str(key)]) for key in keys}
    file.seek(begins)
    return _next(file, storages)[0]


def _next(
    file: BinaryIO, storages: Mapping[str, npt.NDArray[Any]] | None
) -> tuple[Any, dict[str, tuple[str, int]]]:
    """The next pickle of the file, and the storages that it refers to."""
    unpickler = _Unpickler(file, storages)
    return unpickler.load(), unpickler.sizes


def _storage(file: BinaryIO, storage: str, count: int) -> npt.NDArray[Any]:
    """The next storage, whose own count must be the one that the containers gave."""
    own = int.from_bytes(file.read(_COUNT_BYTES), "little")
    size_bytes = count * np.dtype(STORAGES[storage]).itemsize
    if own != count or not 0 <= size_bytes <= MAX_STORAGE_BYTES:
        raise Refused(f"a storage has {own} numbers and not {count}, or is too large")
    data = file.read(size_bytes)
    if len(data) != size_bytes:
        raise Refused("it is cut short")
    return numbers(data, storage)
