"""Clients of a Shoal server, for threads (`Client`) and for asyncio (`AsyncClient`).

`from shoal import Client` is the usual way in.
"""

from shoal.client.core import (
    Classification,
    Encoding,
    Model,
    Options,
    Ranked,
    SparseVector,
)
from shoal.client.shells import AsyncClient, Client

__all__ = [
    "AsyncClient",
    "Classification",
    "Client",
    "Encoding",
    "Model",
    "Options",
    "Ranked",
    "SparseVector",
]
