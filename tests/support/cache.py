"""What several processes of a test run, and later runs, use again: built environments of runtimes.

Builds are named by what they are made of and locked while they are made (`shoal.bundles`), and
unpacked weights by their file, so that nothing stale is ever used. `make clean` removes all of it.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "TEST_CACHE"
_USUAL = Path(__file__).parents[2] / ".cache" / "tests"


def cache_dir() -> Path:
    """The cache folder of workers and runtimes in tests; made when it is not there."""
    folder = Path(os.environ.get(VARIABLE) or _USUAL)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
