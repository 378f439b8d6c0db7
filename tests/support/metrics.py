"""What a process says of itself at /metrics."""

from __future__ import annotations

import httpx

from tests.support.pace import limit_s


def metric(url: str, name: str) -> float:
    """The sum of the values of a metric at a server, over all labels or those that `name` has."""
    lines = httpx.get(f"{url}/metrics", timeout=limit_s(10)).text.splitlines()
    found = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.split()[-1]) for line in found)
