"""Libraries that take seconds to import, for tests that may not run.

Each process of a parallel run reads every test file; only what it runs should cost it anything.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Lazy:
    """A module that is imported when something of it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") or attribute == "pytestmark":  # pytest looks for these
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)
