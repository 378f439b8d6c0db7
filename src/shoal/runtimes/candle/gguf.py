"""What a GGUF file says of itself: its names and values, and where its tensors lie.

Owns reading the head of a file, versions 2 and 3, as the format's specification has it. Does not
own what the names mean (`prompts`) or the weights (the engine's, and `unpack`'s).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from shoal.errors import ModelUnavailable

MAX_HEAD_BYTES = 64 * 1024 * 1024

_NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_TEXT, _LIST = 8, 9
_MAX_DIMENSIONS = 4
_ALIGNMENT_BYTES = 32  # where the file names no other

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor. shape: the fastest dimension first. kind: the format's number of its packing.

    start: its first byte, counted from the first byte of all tensors.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True, slots=True)
class Head:
    """fields_end: the byte behind the names and values. data_start: the first byte of tensors."""

    fields: dict[str, Any]
    fields_end: int
    tensors: tuple[Tensor, ...]
    data_start: int
    alignment_bytes: int


def read_fields(path: Path) -> dict[str, Any]:
    """Name -> number, text or list. Raises `ModelUnavailable` for a file that is cut or no GGUF."""
    return _read(path, lambda file: _fields(file)[1])


def read_head(path: Path) -> Head:
    """All that stands before the tensors. Raises `ModelUnavailable` as `read_fields` does."""
    return _read(path, _head)


def _read(path: Path, read: Callable[[IO[bytes]], T]) -> T:
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF" or _number(file, "<I") not in (2, 3):
                raise ModelUnavailable(f"{path} is no GGUF file of version 2 or 3")
            return read(file)
    except (OSError, struct.error, ValueError) as error:
        raise ModelUnavailable(f"{path} cannot be read as GGUF: {error}") from error


def _fields(file: IO[bytes]) -> tuple[int, dict[str, Any]]:
    """How many tensors there are, and the names and values."""
    tensors = _count(file)
    count = _count(file)
    return tensors, {_text(file): _value(file, _number(file, "<I")) for _ in range(count)}


def _head(file: IO[bytes]) -> Head:
    count, fields = _fields(file)
    fields_end = file.tell()
    tensors = tuple(_tensor(file) for _ in range(count))
    alignment_bytes = fields.get("general.alignment", _ALIGNMENT_BYTES)
    if not isinstance(alignment_bytes, int) or not 0 < alignment_bytes <= MAX_HEAD_BYTES:
        raise ValueError(f"its tensors are aligned to {alignment_bytes!r} bytes")
    data_start = -(-file.tell() // alignment_bytes) * alignment_bytes
    return Head(fields, fields_end, tensors, data_start, alignment_bytes)


def _tensor(file: IO[bytes]) -> Tensor:
    name = _text(file)
    dimensions = _number(file, "<I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"{name} has {dimensions} dimensions")
    shape = tuple(_number(file, "<Q") for _ in range(dimensions))
    return Tensor(name, shape, _number(file, "<I"), _number(file, "<Q"))


def _number(file: IO[bytes], form: str) -> Any:
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]


def _count(file: IO[bytes]) -> int:
    """How many come now: each takes a byte at least, and all of the head has a bound."""
    count: int = _number(file, "<Q")
    if file.tell() + count > MAX_HEAD_BYTES:
        raise ValueError(f"its head has more than {MAX_HEAD_BYTES} bytes")
    return count


def _text(file: IO[bytes]) -> str:
    size_bytes = _count(file)
    text = file.read(size_bytes)
    if len(text) < size_bytes:
        raise ValueError("it is cut short")
    return text.decode("utf-8", "replace")


def _value(file: IO[bytes], kind: int) -> Any:
    if kind == _TEXT:
        return _text(file)
    if kind != _LIST:
        if kind not in _NUMBERS:
            raise ValueError(f"a value of the unknown kind {kind}")
        return _number(file, _NUMBERS[kind])
    inner = _number(file, "<I")
    if inner == _LIST:
        raise ValueError("a list of lists")
    return [_value(file, inner) for _ in range(_count(file))]
