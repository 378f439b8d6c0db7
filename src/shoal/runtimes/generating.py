"""What a generator is told besides its weights: options of its entry, settings of its own files.

Owns reading both. Does not own what any of them means to an engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.errors import ModelUnavailable
from shoal.ipc.messages import ModelSpec


def whole_number(
    spec: ModelSpec, name: str, usual: int, least: int, most: int | None = None
) -> int:
    """An option that is a whole number. Raises `ModelUnavailable`."""
    value = spec.options.get(name, usual)
    if not isinstance(value, int) or value < least or (most is not None and value > most):
        span = f"from {least} on" if most is None else f"from {least} to {most}"
        raise ModelUnavailable(f"{spec.key}: option {name} is a whole number {span}, not {value!r}")
    return value


def own_sampling(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """How the model's own `generation_config.json` wants a token chosen, as far as it says.

    Raises `ModelUnavailable`.
    """
    path = folder / "generation_config.json"
    try:
        found = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ModelUnavailable(f"{path} is no JSON: {error}") from error
    return {name: found[name] for name in names if found.get(name) is not None}
