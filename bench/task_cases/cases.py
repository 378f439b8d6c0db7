"""What is asked of each model: inputs for every task, as requests and as items for a runtime.

Texts are paragraphs of contracts, documents and pictures their pages, sounds spoken samples. Owns
the inputs and both their forms. Does not own measuring.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from harness import http_request
from PIL import Image

from examples.contract_review.documents import contracts
from shoal.catalog.schema import Entry
from shoal.core.types import Task
from shoal.wire.envelope import Inputs, Params

CONTRACTS = 36
QUERY = "How can this agreement be ended?"
CANDIDATES = 16  # texts that one query is scored against
# Inputs of one request; a text is cheap, and a page may take a second.
PER_REQUEST = {"text": 16, "image": 8, "file": 16, "document": 1, "audio": 4}
PATHS = {"transcribe": "/v1/audio/transcriptions"}
PICTURE_PIXELS = (320, 240)
DOCUMENT_PIXELS = 500  # from the top of a page: a title and a dozen lines
SOUNDS = 8  # the shortest samples
SAMPLES = "pytest_audioeval"  # the package with spoken samples, which only developers have


@dataclass(frozen=True, slots=True)
class Case:
    """One task of one model. items: what a request is made of; `each` inputs are in one."""

    entry: Entry
    task: Task
    items: Sequence[Inputs]
    each: int
    per_request: int

    @property
    def params(self) -> Params:
        """How the inputs are to be run: the first output that the model has."""
        names: dict[str, Iterable[str]] = {
            "encode": self.entry.outputs,
            "extract": self.entry.extracts,
        }
        return Params(outputs=list(names.get(self.task, ()))[:1])

    def requests(self, url: str) -> list[bytes]:
        """All items as HTTP requests of `per_request` items, each of the same size."""
        n = self.per_request
        groups = [self.items[at : at + n] for at in range(0, len(self.items) - n + 1, n)]
        return [self._request(url, group) for group in groups]

    def alone(self, url: str) -> list[bytes]:
        """Some items as requests of their own."""
        return [self._request(url, [item]) for item in self.items[:8]]

    def _request(self, url: str, group: Sequence[Inputs]) -> bytes:
        body: dict[str, Any] = {"model": self.entry.id}
        first = group[0]
        if self.task == "score":
            body |= {"query": first.query, "texts": first.texts}
        elif self.task == "transcribe":
            body["file"] = {"data": first.blobs[0]}
        elif first.firsts:
            body["inputs"] = [[one.firsts[0], one.texts[0]] for one in group]
        elif first.blobs:
            body["inputs"] = [{"data": one.blobs[0]} for one in group]
        else:
            body["inputs"] = [one.texts[0] for one in group]
        path = PATHS.get(self.task, f"/v1/{self.task}")
        return http_request(url, path, msgspec.msgpack.encode(body), "application/msgpack")


def case(entry: Entry, task: Task) -> Case | None:
    """The case of a model's task; None where its inputs are not at hand."""
    kind = entry.inputs[0]
    if task == "score":
        starts = range(0, len(_texts()) - CANDIDATES + 1, CANDIDATES)
        items = [Inputs(texts=_texts()[at : at + CANDIDATES], query=QUERY) for at in starts]
        return Case(entry, task, items, CANDIDATES, 1)
    if kind != "text":
        items = _files(kind)
    elif task == "classify" and _takes_pairs(entry):
        items = [Inputs(texts=[b], firsts=[a]) for a, b in pairwise(_texts())]
    else:
        items = [Inputs(texts=[text]) for text in _texts()]
    if not items:
        return None
    per_request = 1 if task == "transcribe" else PER_REQUEST[kind]
    return Case(entry, task, items, 1, min(len(items), per_request))


def _takes_pairs(entry: Entry) -> bool:
    head = entry.heads.get("classify")
    return head is not None and head.kind == "pair"


@cache
def _texts() -> list[str]:
    blobs = [one.blob for one in contracts(CONTRACTS, seed=0) if one.kind == "txt"]
    return [text for blob in blobs for text in blob.decode().split("\n\n")]


def _files(kind: str) -> list[Inputs]:
    blobs = {"image": _pictures, "document": _pages, "audio": _sounds, "file": _mixed}[kind]()
    return [Inputs(blobs=[blob]) for blob in blobs]


@cache
def _mixed() -> list[bytes]:
    return [one.blob for one in contracts(CONTRACTS, seed=0)]


@cache
def _drawn() -> list[Image.Image]:
    drawn = [one.blob for one in contracts(CONTRACTS, seed=0) if one.kind == "png"]
    return [Image.open(io.BytesIO(blob)) for blob in drawn]


@cache
def _pages() -> list[bytes]:
    return [_encoded(one.crop((0, 0, one.width, DOCUMENT_PIXELS)), "PNG") for one in _drawn()]


@cache
def _pictures() -> list[bytes]:
    """Pages as small as a picture on the web."""
    return [_encoded(one.resize(PICTURE_PIXELS), "JPEG") for one in _drawn()]


def _encoded(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


@cache
def _sounds() -> list[bytes]:
    return sorted((path.read_bytes() for path in _samples()), key=len)[:SOUNDS]


def _samples() -> Iterator[Path]:
    found = importlib.util.find_spec(SAMPLES)
    for folder in (found and found.submodule_search_locations) or []:
        yield from Path(folder).glob("samples/audio/en/*.wav")
