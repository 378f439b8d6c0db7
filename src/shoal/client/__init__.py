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
from shoal.client.core import GenerationOptions, Options
from shoal.client.growing import AsyncGrowing, Growing
from shoal.client.shells import AsyncClient, Client
from shoal.client.texts import Generated

__all__ = [
    "AsyncClient",
    "AsyncGrowing",
    "Classification",
    "Client",
    "Encoding",
    "Entity",
    "Extraction",
    "Generated",
    "GenerationOptions",
    "Growing",
    "InputsFailed",
    "Model",
    "Options",
    "Ranked",
    "SparseVector",
    "Transcript",
]
