"""A file of what a worker has learnt, kept across restarts.

Owns reading it and writing it in one piece. A file that cannot be read is an estimate less, never
an error. Does not own what is in it (`costs`, `sizes`).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TypeVar

import msgspec

log = logging.getLogger(__name__)

T = TypeVar("T")


def read_book(file: Path, kind: type[T]) -> dict[str, T]:
    """The entries of a book; none where there is no file, or no readable one."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, kind])  # type: ignore[valid-type]
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        log.warning("%s is not readable, it is learnt anew: %s", file, error)
        return {}


def write_book(file: Path, entries: dict[str, T], most: int) -> None:
    """Writes a book in one piece; of more than `most` entries the first are forgotten."""
    for key in list(entries)[:-most]:
        del entries[key]
    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(entries), indent=1))
        part.replace(file)
    except OSError as error:
        log.warning("%s cannot be written: %s", file, error)
