"""Clients of a Shoal server, for threads (`Client`) and for asyncio (`AsyncClient`).

`from shoal import Client` is the usual way in.
"""

from shoal.client.answers import (
    Classification,
    Encoding,
    Entity,
    Extraction,
    InputsFailed,
    Model,
    Ranked,
    SparseVector,
    Transcript,
)
from shoal.client.core import Options
from shoal.client.shells import AsyncClient, Client

__all__ = [
    "AsyncClient",
    "Classification",
    "Client",
    "Encoding",
    "Entity",
    "Extraction",
    "InputsFailed",
    "Model",
    "Options",
    "Ranked",
    "SparseVector",
    "Transcript",
]
