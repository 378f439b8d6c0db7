"""What a GGUF file says of itself: its names and values, without its tensors.

Owns reading the head of a file, versions 2 and 3, as the format's specification has it. Does not
own what the names mean (`prompts`) or the weights (the engine's).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import IO, Any

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


def read_fields(path: Path) -> dict[str, Any]:
    """Name -> number, text or list. Raises `ModelUnavailable` for a file that is cut or no GGUF."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF" or _number(file, "<I") not in (2, 3):
                raise ModelUnavailable(f"{path} is no GGUF file of version 2 or 3")
            _number(file, "<Q")  # tensors
            count = _count(file)
            return {_text(file): _value(file, _number(file, "<I")) for _ in range(count)}
    except (OSError, struct.error, ValueError) as error:
        raise ModelUnavailable(f"{path} cannot be read as GGUF: {error}") from error


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
