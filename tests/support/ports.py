"""Free ports, for servers that must know theirs before they start."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port that nobody has at the moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
