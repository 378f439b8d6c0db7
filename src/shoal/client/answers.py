"""What a server's answers become: arrays and small structures, and the error of a part of them.

Owns reading the answers, and `InputsFailed`. Does not own what is asked (`core`). Sans-io.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.client.exchange import Reply
from shoal.errors import ShoalError, from_code
from shoal.wire.arrays import Array
from shoal.wire.records import Page, Segment

Floats = NDArray[np.float32]


class InputsFailed(ShoalError):
    """Some inputs of a call failed, and others did not.

    errors: why, by the input's index. indices: the inputs that are well. results: what the call
    would have returned for those alone.
    """

    code = "inputs_failed"

    def __init__(self, results: Any, errors: dict[int, ShoalError], n: int) -> None:
        first = min(errors)
        super().__init__(
            f"{len(errors)} of {n} inputs failed; inputs[{first}]: {errors[first].message}",
            param=errors[first].param,
            input_index=first,
        )
        self.results = results
        self.errors = errors
        self.indices = [at for at in range(n) if at not in errors]


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """indices: uint32 [k], positions in the vocabulary. values: float32 [k]."""

    indices: NDArray[np.uint32]
    values: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """All outputs of an encoder, in the order of the inputs.

    dense: [n, d]. multivector: for each input the vectors of its tokens, [tokens, d]. Both are
    float32 unless another dtype was asked for.
    """

    model: str
    tokens: int
    dense: Floats | None
    sparse: list[SparseVector] | None
    multivector: list[Floats] | None = None


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document's place among the others; `index` is its position in the request."""

    index: int
    score: float
    document: str


@dataclass(frozen=True, slots=True)
class Classification:
    """The best label, its probability, and those of all labels that came back, best first.

    labels: all that apply, where each was judged by itself (`multi_label`).
    """

    label: str
    score: float
    scores: dict[str, float]
    labels: list[str] | None = None


class Entity(msgspec.Struct, frozen=True):
    """A stretch of a text: characters from `start` to before `end`."""

    label: str
    text: str
    start: int
    end: int
    score: float


class Extraction(msgspec.Struct, frozen=True):
    """What was found in one input; only what was asked for is filled.

    text: all lines of all pages. pages: the lines and regions of each page or image, with their
    places in pixels. segments: stretches of speech, in seconds.
    """

    entities: list[Entity] = []
    text: str = ""
    pages: list[Page] = []
    segments: list[Segment] = []
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Transcript:
    """What was said. language: as ISO 639-1."""

    text: str
    language: str
    duration_s: float
    segments: list[Segment]


class Model(msgspec.Struct, frozen=True):
    """A model of the server. outputs: kinds of vectors and their length.

    inputs: what an input may be. extracts: what `extract` finds. memory_bytes: of one copy, as
    measured; 0 while unknown.
    """

    id: str
    revision: str
    tasks: list[str]
    aliases: list[str] = []
    endpoints: list[str] = []
    outputs: dict[str, int] = {}
    prompts: list[str] = []
    labels: list[str] = []
    max_tokens: int = 0
    runtime: str = ""
    state: str = ""
    inputs: list[str] = msgspec.field(default_factory=lambda: ["text"])
    extracts: list[str] = []
    memory_bytes: int = 0
    licence: str | None = None
    description: str = ""


class _Usage(msgspec.Struct):
    total_tokens: int


class _Sparse(msgspec.Struct):
    indices: Array
    values: Array


class _Fault(msgspec.Struct):
    index: int
    code: str
    message: str
    param: str | None = None


class _Encoded(msgspec.Struct):
    model: str
    usage: _Usage
    dense: Array | list[Array | None] | None = None
    sparse: list[_Sparse | None] | None = None
    multivector: list[Array | None] | None = None
    errors: list[_Fault] = []


class _Scored(msgspec.Struct):
    scores: Array


class _Place(msgspec.Struct):
    index: int
    relevance_score: float


class _Reranked(msgspec.Struct):
    results: list[_Place]


class _Class(msgspec.Struct):
    label: str
    score: float


class _OneClassified(msgspec.Struct):
    label: str = ""
    scores: list[_Class] = []
    labels: list[str] | None = None
    error: _Fault | None = None


class _Classified(msgspec.Struct):
    results: list[_OneClassified]


class _OneExtracted(Extraction, frozen=True):
    error: _Fault | None = None


class _Extracted(msgspec.Struct):
    results: list[_OneExtracted]


class _Stretch(msgspec.Struct):
    start: float
    end: float
    text: str


class _Transcribed(msgspec.Struct):
    text: str
    language: str = ""
    duration: float = 0.0
    segments: list[_Stretch] = []


class _Models(msgspec.Struct):
    data: list[Model]


S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")


def _decode(reply: Reply, kind: type[S]) -> S:
    return msgspec.msgpack.decode(reply.content, type=kind)


def _numpy(array: Array) -> NDArray[Any]:
    dtype = np.dtype(array.dtype).newbyteorder("<")
    block = np.frombuffer(array.data, dtype).reshape(array.shape)
    return block.astype(array.dtype)  # a copy: the caller may write to it


def _whole(results: T, faults: Sequence[_Fault], n: int) -> T:
    """The results where no input has failed. Raises `InputsFailed`."""
    if not faults:
        return results
    errors = {
        fault.index: from_code(
            fault.code, fault.message, param=fault.param, input_index=fault.index
        )
        for fault in faults
    }
    raise InputsFailed(results, errors, n)


def dense(reply: Reply) -> Floats:
    """Dense vectors: [n, d]."""
    encoded = _decode(reply, _Encoded)
    if encoded.dense is None:
        raise ValueError("the answer has no dense vectors")
    block = _stacked(encoded.dense)
    return _whole(block, encoded.errors, len(block) + len(encoded.errors))


def sparse(reply: Reply) -> list[SparseVector]:
    """Sparse vectors."""
    encoded = _decode(reply, _Encoded)
    vectors = _sparse(encoded)
    return _whole(vectors, encoded.errors, len(vectors) + len(encoded.errors))


def encoding(reply: Reply) -> Encoding:
    """All outputs."""
    encoded = _decode(reply, _Encoded)
    tokens = encoded.multivector
    made = Encoding(
        encoded.model,
        encoded.usage.total_tokens,
        None if encoded.dense is None else _stacked(encoded.dense),
        None if encoded.sparse is None else _sparse(encoded),
        None if tokens is None else [_numpy(block) for block in tokens if block is not None],
    )
    n = next(
        (len(kind) for kind in (made.dense, made.sparse, made.multivector) if kind is not None), 0
    )
    return _whole(made, encoded.errors, n + len(encoded.errors))


def _stacked(block: Array | list[Array | None]) -> Floats:
    if isinstance(block, Array):
        return _numpy(block)
    return np.stack([_numpy(row) for row in block if row is not None])


def _sparse(encoded: _Encoded) -> list[SparseVector]:
    return [
        SparseVector(_numpy(one.indices), _numpy(one.values))
        for one in encoded.sparse or []
        if one is not None
    ]


def scores(reply: Reply) -> Floats:
    """Scores: float32 [n]."""
    return _numpy(_decode(reply, _Scored).scores)


def ranked(reply: Reply, documents: Sequence[str]) -> list[Ranked]:
    """The documents, best first."""
    places = _decode(reply, _Reranked).results
    return [Ranked(p.index, p.relevance_score, documents[p.index]) for p in places]


def classes(reply: Reply) -> list[Classification]:
    """The labels of each input."""
    results = _decode(reply, _Classified).results
    made = [
        Classification(
            one.label, one.scores[0].score, {c.label: c.score for c in one.scores}, one.labels
        )
        for one in results
        if one.error is None
    ]
    return _whole(made, [one.error for one in results if one.error is not None], len(results))


def extractions(reply: Reply) -> list[Extraction]:
    """What was found in each input."""
    results = _decode(reply, _Extracted).results
    made = [
        Extraction(one.entities, one.text, one.pages, one.segments, one.duration_s)
        for one in results
        if one.error is None
    ]
    return _whole(made, [one.error for one in results if one.error is not None], len(results))


def transcript(reply: Reply) -> Transcript:
    """What was said."""
    said = _decode(reply, _Transcribed)
    segments = [Segment(one.start, one.end, one.text) for one in said.segments]
    return Transcript(said.text, said.language, said.duration, segments)


def models(reply: Reply) -> list[Model]:
    """All models."""
    return _decode(reply, _Models).data


def model(reply: Reply) -> Model:
    """One model."""
    return _decode(reply, Model)
