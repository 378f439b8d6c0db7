"""How a route tells of texts while they grow.

Owns the seam between a route that streams and the sending of its events (`stream`). Does not own
the shape of any event or how it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from shoal.wire.generation import Generated, Piece


class Telling(Protocol):
    """One streamed answer: what has happened becomes events, in order."""

    # What follows the last event, where clients look for a mark of the end.
    done: bytes

    def piece(self, index: int, piece: Piece) -> Sequence[msgspec.Struct]:
        """A text has grown."""

    def end(self, index: int, generated: Generated) -> Sequence[msgspec.Struct]:
        """A text is whole."""

    def last(self, texts: Sequence[Generated]) -> Sequence[msgspec.Struct]:
        """All texts are whole; in the order of their inputs."""
