"""Shoal: large clusters for small models.

Importing this package loads neither a runtime library nor the server: the client is resolved
when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.client import AsyncClient, Client

__version__ = "0.1.0"  # the package's version, too (pyproject.toml reads it here)

__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("Client", "AsyncClient"):
        return getattr(import_module("shoal.client"), name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
