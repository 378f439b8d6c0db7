"""Says which runtimes an environment can run, and on what, as JSON on standard output.

    python -m shoal.runtimes.probe
    ->  {"onnx": {"why_not": null, "devices": [], "tasks": ["encode", ...], "adapts": null},
         "torch": {"why_not": "torch is not installed: ...", ...}, ...}

A worker asks this of each environment instead of importing runtimes itself. Owns nothing else.
"""

from __future__ import annotations

import sys

import msgspec

from shoal.errors import RuntimeUnavailable
from shoal.ipc.facts import Facts
from shoal.runtimes.registry import facts, names


def probe() -> dict[str, str | None]:
    """Every registered runtime with None, or the reason why it cannot run here."""
    return {name: found.why_not for name, found in probe_facts().items()}


def probe_facts() -> dict[str, Facts]:
    """Every registered runtime, with what is known of it."""
    found: dict[str, Facts] = {}
    for name in names():
        try:
            found[name] = facts(name)
        except RuntimeUnavailable as error:
            found[name] = Facts(error.message)
    return found


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(probe_facts()))
