"""`shoal run`: texts or files to a running server, and the answer as a table or as it grows.

Owns the choice of a task, which arguments are files, and the looks. Does not own requests
(`shoal.client`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
from rich.console import Console
from rich.table import Table

from shoal.client import (
    Client,
    Encoding,
    Extraction,
    GenerationOptions,
    Model,
    SparseVector,
)
from shoal.client.core import ExtractName, OutputName, Turn
from shoal.core.spelling import did_you_mean
from shoal.core.types import TASKS
from shoal.errors import InvalidRequest

SHOWN_VALUES = 3
# Of each text that is generated, where nothing is said: a small model may go on for its whole
# context.
USUAL_TOKENS = 256


def send(
    model: str,
    given: list[str],
    *,
    query: str | None,
    task: str | None,
    url: str,
    system: str | None,
    options: GenerationOptions,
) -> None:
    """Runs texts, or the files that are named, and prints the answer. Raises what the client does.

    query: the first text of every pair. task: None for what the model does first; with a query,
    `score`. system, options: of a model that generates; its answer is printed
    as it grows. Nothing is tried twice: a person at a terminal would see nothing happen.
    """
    for number, text in enumerate(given):
        if not text:
            raise InvalidRequest(f"inputs[{number}] is empty", param=f"inputs[{number}]")
    with Client(url, max_retries=0) as client:
        known = client.model(model)
        chosen = _task(known, query, task)
        _say_what_is_no_file(known, given)
        if chosen == "generate":
            _say(client, known, given, system, options)
            return
        if system is not None or options:
            raise InvalidRequest(f"`{known.id}` does not generate: it has none of these options")
        if chosen == "score":
            table = _scores(client, known, query or "", given)
        elif chosen == "classify":
            table = _classes(client, known, query, _inputs(known, given))
        elif chosen == "extract":
            table = _found(client, known, _inputs(known, given))
        elif chosen == "transcribe":
            table = _transcripts(client, known, _inputs(known, given))
        else:
            table = _vectors(client, known, _inputs(known, given))
    Console(highlight=False).print(table)


def _inputs(model: Model, given: list[str]) -> list[str | Path]:
    """Arguments are texts, unless the model takes files; then those that name one are it."""
    if model.inputs == ["text"]:
        return list(given)
    inputs: list[str | Path] = []
    for one in given:
        if _is_file(one):
            inputs.append(Path(one))
        elif "text" in model.inputs:
            inputs.append(one)
        else:
            raise InvalidRequest(
                f"`{model.id}` takes {' or '.join(model.inputs)}, and {one!r} is no file"
            )
    return inputs


def _say_what_is_no_file(model: Model, given: list[str]) -> None:
    if model.inputs != ["text"]:
        return
    for name in given:
        if _is_file(name):
            Console(stderr=True, highlight=False).print(
                f"note: `{name}` is sent as these letters: {model.id} takes texts, and no files",
                markup=False,
                soft_wrap=True,
            )


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # a text that is no name of anything
        return False


def _task(model: Model, query: str | None, wanted: str | None) -> str:
    if wanted is not None and wanted not in TASKS:
        raise InvalidRequest(f"unknown task `{wanted}`{did_you_mean(wanted, TASKS)}", param="task")
    task = wanted or ("score" if query is not None else model.tasks[0])
    if task == "score" and query is None:
        raise InvalidRequest("a score is of two texts: give the first with --query", param="query")
    if task in ("encode", "generate") and query is not None:
        raise InvalidRequest(f"`{task}` takes no --query", param="query")
    return task


def _say(
    client: Client, model: Model, texts: list[str], system: str | None, options: GenerationOptions
) -> None:
    """Answers each text as the user's turn of a conversation of its own, as it grows."""
    console = Console(highlight=False)
    bounded: GenerationOptions = {"max_tokens": USUAL_TOKENS, **options}
    for text in texts:
        if len(texts) > 1:
            console.print(f"> {text}", style="dim", markup=False)
        turns: list[Turn] = [{"role": "user", "content": text}]
        if system is not None:
            turns.insert(0, {"role": "system", "content": system})
        with client.chat_stream(turns, model.id, **bounded) as growing:
            for part in growing:
                console.out(part, end="", highlight=False)
                console.file.flush()
            console.out("")
            if growing.generated.finish_reason == "length":
                Console(stderr=True).print(
                    f"cut off after {growing.generated.tokens} tokens", style="dim"
                )


def _scores(client: Client, model: Model, query: str, texts: list[str]) -> Table:
    table = _table("SCORE", "TEXT")
    for place in client.rerank(query, texts, model.id):
        table.add_row(f"{place.score:.4f}", place.document)
    return table


def _classes(
    client: Client, model: Model, first: str | None, inputs: Sequence[str | Path]
) -> Table:
    table = _table("LABEL", "PROBABILITY", "INPUT")
    if first is None:
        found = client.classify(inputs, model.id)
    else:
        found = client.classify([(first, str(text)) for text in inputs], model.id)
    for one, label in zip(inputs, found, strict=True):
        table.add_row(label.label, f"{label.score:.4f}", str(one))
    return table


def _found(client: Client, model: Model, inputs: Sequence[str | Path]) -> Table:
    table = _table("INPUT", "WHAT", "SCORE", "WHERE", "FOUND")
    found = client.extract(inputs, model.id, outputs=cast("list[ExtractName]", model.extracts))
    for one, extraction in zip(inputs, found, strict=True):
        for row in _rows(extraction):
            table.add_row(str(one), *row)
    return table


def _rows(found: Extraction) -> list[tuple[str, str, str, str]]:
    """What it is, its score, where it is, its text; a row for each thing found."""
    rows = [(e.label, f"{e.score:.4f}", f"{e.start}-{e.end}", e.text) for e in found.entities]
    for number, page in enumerate(found.pages, start=1):
        for line in page.lines:
            left, top = line.box[0]
            where = f"page {number}, {left:.0f} {top:.0f}"
            rows.append(("text", f"{line.score:.4f}", where, line.text))
        for part in page.regions:
            where = f"page {number}, " + " ".join(f"{side:.0f}" for side in part.box)
            rows.append((part.label, f"{part.score:.4f}", where, ""))
    rows += [
        ("speech", "", f"{part.start_s:.2f}-{part.end_s:.2f} s", part.text)
        for part in found.segments
    ]
    return rows


def _transcripts(client: Client, model: Model, inputs: Sequence[str | Path]) -> Table:
    table = _table("SECONDS", "LANGUAGE", "TEXT")
    for one in inputs:
        if isinstance(one, str):
            raise InvalidRequest(f"{one!r} is no file")
        said = client.transcribe(one, model.id)
        table.add_row(f"{said.duration_s:.1f}", said.language, said.text)
    return table


def _vectors(client: Client, model: Model, inputs: Sequence[str | Path]) -> Table:
    encoding = client.encode_outputs(inputs, model.id, _outputs(model))
    table = _table("INPUT", "VECTOR", *(["COSINE TO THE FIRST"] if _comparable(encoding) else []))
    for index, one in enumerate(inputs):
        table.add_row(str(one), *_cells(encoding, index))
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
    if encoding.multivector is not None:
        n_tokens, dim = encoding.multivector[index].shape
        lines.append(f"multivector: {n_tokens} of {dim}")
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
