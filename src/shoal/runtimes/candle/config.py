"""A folder's `config.json` as the engines on Candle read it. Owns that one difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.runtimes.bert import read_config


def config_of(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`, with the base of rotary positions where the engines look.

    Newer versions of transformers write it into `rope_parameters`. Raises `ModelUnavailable`.
    """
    config = read_config(folder)
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        config.setdefault("rope_theta", rope["rope_theta"])
    return config
