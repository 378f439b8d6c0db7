"""How a fetch tells how far it is.

Owns that one shape. It is called with the bytes done and the bytes in all, often, and from whatever
thread does the work; 0, 0 says that something goes on which has no count (another process fetches
the same, or files are compared). What it raises ends the work, and a later try goes on from there;
an `OSError` would be taken for one of the work itself.
"""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[int, int], None]


def untold(done_bytes: int, total_bytes: int) -> None:
    """Hears it and does nothing."""
