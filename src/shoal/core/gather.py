"""The parts of a request's answer, as they come back in any order and sometimes twice.

Owns which part is kept (the first of each index) and when all are there. Does not own joining.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Gather(Generic[T]):
    """Collects `of` parts by index."""

    def __init__(self, of: int) -> None:
        self._parts: list[T | None] = [None] * of
        self._missing = of

    @property
    def complete(self) -> bool:
        """Whether every part is there."""
        return self._missing == 0

    def add(self, index: int, part: T) -> bool:
        """Keeps a part; False when there is one already, or no such index."""
        if not 0 <= index < len(self._parts) or self._parts[index] is not None:
            return False
        self._parts[index] = part
        self._missing -= 1
        return True

    def parts(self) -> list[T]:
        """All parts by index. Raises ValueError while some are missing."""
        parts = [part for part in self._parts if part is not None]
        if self._missing:
            raise ValueError(f"{self._missing} parts are missing")
        return parts
