"""Says which runtimes an environment can run, as JSON on standard output.

    python -m shoal.runtimes.probe    ->  {"onnx": null, "torch": "torch is not installed: ..."}

A worker asks this of each environment instead of importing runtimes itself. Owns nothing else.
"""

from __future__ import annotations

import json
import sys

from shoal.errors import RuntimeUnavailable
from shoal.runtimes.registry import available, names


def probe() -> dict[str, str | None]:
    """Every registered runtime with None, or the reason why it cannot run here."""
    found: dict[str, str | None] = {}
    for name in names():
        try:
            found[name] = available(name)
        except RuntimeUnavailable as error:
            found[name] = error.message
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()))
