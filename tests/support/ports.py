"""Free ports, for servers that must know theirs before they start."""

from __future__ import annotations

import itertools
import os
import socket

# Below the ports that the kernel hands out by itself, and a span for each process of a test run:
# nobody else takes a port between its choice and its use.
_FIRST = 20_000
_SPAN = 500
_process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_span = range(_FIRST + _process * _SPAN, _FIRST + (_process + 1) * _SPAN)
# Runs that follow one another begin elsewhere: an address rests for a while after its use.
_ports = itertools.islice(itertools.cycle(_span), os.getpid() % _SPAN, None)


def free_port() -> int:
    """A port that nobody has, and that is given to nobody else for long."""
    for port in itertools.islice(_ports, _SPAN):
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no port is free from {_span.start} to {_span.stop}")
