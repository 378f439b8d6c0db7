"""Whether files are the ones that an entry means.

Owns comparing SHA-256 digests, and remembering what was compared, so that a large file is read once
and not at every load. Does not own what becomes of a file that differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from shoal.errors import ModelUnavailable, WeightsMissing

# Each is an empty file. What goes is compared anew when it is needed.
MAX_MARKS = 10_000
_CHUNK_BYTES = 2**20


class DigestMismatch(ModelUnavailable):
    """A file is not the one that its entry means; `file` is where it lies."""

    def __init__(self, message: str, *, file: Path) -> None:
        super().__init__(message)
        self.file = file


def verify(
    folder: Path,
    digests: Mapping[str, str],
    marks: Path,
    on_read: Callable[[], None] = lambda: None,
) -> None:
    """Compares files of a folder with their digests (lower-case hexadecimal SHA-256, by path).

    marks: the folder that remembers what was compared, by place, size and time of change. on_read
    is called after each MiB; what it raises ends the comparison. Raises `DigestMismatch`, and
    `WeightsMissing` for a file that is not there.
    """
    for name, expected in digests.items():
        path = folder / name
        try:
            facts = path.stat()
            text = f"{path.resolve()}\0{facts.st_size}\0{facts.st_mtime_ns}\0{expected}"
            mark = marks / hashlib.sha256(text.encode()).hexdigest()
            if mark.is_file():
                continue
            found = _digest(path, on_read)
        except OSError as error:
            raise WeightsMissing(
                f"{path}, whose digest is given, cannot be read: {error}"
            ) from error
        if found != expected:
            raise DigestMismatch(
                f"{path} is not what its entry means: its SHA-256 is {found}, not {expected}",
                file=path,
            )
        _remember(mark)


def _digest(path: Path, on_read: Callable[[], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            on_read()
    return digest.hexdigest()


def _remember(mark: Path) -> None:
    with suppress(OSError):  # the next load compares again, nothing else
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
        marks = sorted(mark.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for old in marks[:-MAX_MARKS]:
            old.unlink(missing_ok=True)
