"""Says which runtimes an environment can run, and on what, as JSON on standard output.

    python -m shoal.runtimes.probe
    ->  {"onnx": {"why_not": null, "devices": [], "adapts": false},
         "torch": {"why_not": "torch is not installed: ...", ...}, ...}

A worker asks this of each environment instead of importing runtimes itself. Owns nothing else.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from shoal.errors import RuntimeUnavailable
from shoal.runtimes.registry import adapts, available, devices, names


def probe() -> dict[str, str | None]:
    """Every registered runtime with None, or the reason why it cannot run here."""
    return {name: facts["why_not"] for name, facts in probe_facts().items()}


def probe_facts() -> dict[str, dict[str, Any]]:
    """Every registered runtime: why it cannot run here, its kinds of device, and adapters."""
    found: dict[str, dict[str, Any]] = {}
    for name in names():
        try:
            facts = {"why_not": available(name), "devices": devices(name), "adapts": adapts(name)}
        except RuntimeUnavailable as error:
            facts = {"why_not": error.message, "devices": [], "adapts": False}
        found[name] = facts
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe_facts()))
