"""Shoal: large clusters for small models.

Importing this package loads neither a runtime library nor the server: the client is resolved
when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.client import AsyncClient, Client

try:
    __version__ = version("shoal")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("Client", "AsyncClient"):
        return getattr(import_module("shoal.client"), name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
