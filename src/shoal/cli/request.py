"""`shoal run`: texts to a running server, and the answer as a table.

Owns the choice of a task and the looks. Does not own requests (`shoal.client`).
"""

from __future__ import annotations

from typing import cast

import numpy as np
from rich.console import Console
from rich.table import Table

from shoal.client import Client, Encoding, Model, SparseVector
from shoal.client.core import OutputName
from shoal.core.spelling import did_you_mean
from shoal.core.types import TASKS
from shoal.errors import InvalidRequest

SHOWN_VALUES = 3


def send(model: str, texts: list[str], *, query: str | None, task: str | None, url: str) -> None:
    """Runs the texts and prints the answer. Raises what the client raises.

    query: the first text of every pair. task: None for what the model does first; with a query,
    `score`.
    """
    with Client(url) as client:
        known = client.model(model)
        chosen = _task(known, query, task)
        if chosen == "score":
            table = _scores(client, known, query or "", texts)
        elif chosen == "classify":
            table = _classes(client, known, query, texts)
        else:
            table = _vectors(client, known, texts)
    Console(highlight=False).print(table)


def _task(model: Model, query: str | None, wanted: str | None) -> str:
    if wanted is not None and wanted not in TASKS:
        raise InvalidRequest(f"unknown task `{wanted}`{did_you_mean(wanted, TASKS)}", param="task")
    task = wanted or ("score" if query is not None else model.tasks[0])
    if task == "score" and query is None:
        raise InvalidRequest("a score is of two texts: give the first with --query", param="query")
    if task == "encode" and query is not None:
        raise InvalidRequest("`encode` takes no --query", param="query")
    return task


def _scores(client: Client, model: Model, query: str, texts: list[str]) -> Table:
    table = _table("SCORE", "TEXT")
    for place in client.rerank(query, texts, model.id):
        table.add_row(f"{place.score:.4f}", place.document)
    return table


def _classes(client: Client, model: Model, first: str | None, texts: list[str]) -> Table:
    table = _table("LABEL", "PROBABILITY", "TEXT")
    if first is None:
        found = client.classify(texts, model.id)
    else:
        found = client.classify([(first, text) for text in texts], model.id)
    for text, one in zip(texts, found, strict=True):
        table.add_row(one.label, f"{one.score:.4f}", text)
    return table


def _vectors(client: Client, model: Model, texts: list[str]) -> Table:
    encoding = client.encode_outputs(texts, model.id, _outputs(model))
    table = _table("TEXT", "VECTOR", *(["COSINE TO THE FIRST"] if _comparable(encoding) else []))
    for index, text in enumerate(texts):
        table.add_row(text, *_cells(encoding, index))
    return table


def _outputs(model: Model) -> list[OutputName]:
    return cast("list[OutputName]", list(model.outputs) or ["dense"])


def _comparable(encoding: Encoding) -> bool:
    return encoding.dense is not None and len(encoding.dense) > 1


def _cells(encoding: Encoding, index: int) -> list[str]:
    lines = []
    if encoding.dense is not None:
        vector = encoding.dense[index]
        head = " ".join(f"{value:+.4f}" for value in vector[:SHOWN_VALUES])
        lines.append(f"dense {len(vector)}: {head} ...")
    if encoding.sparse is not None:
        lines.append(_sparse_line(encoding.sparse[index]))
    cells = ["\n".join(lines)]
    if encoding.dense is not None and _comparable(encoding):
        first, vector = encoding.dense[0], encoding.dense[index]
        length = float(np.linalg.norm(first) * np.linalg.norm(vector))
        cells.append(f"{float(first @ vector) / length if length else 0.0:.4f}")
    return cells


def _sparse_line(vector: SparseVector) -> str:
    best = np.argsort(-vector.values, kind="stable")[:SHOWN_VALUES]
    pairs = " ".join(f"{vector.indices[i]}:{vector.values[i]:.2f}" for i in best)
    return f"sparse {len(vector.indices)}: {pairs} ..."


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold")
    return table
