"""What can be asked of a server: arguments in, a `Call` out; an answer in, arrays out.

Owns every method of both clients, written once. Sans-io. Does not own retries (`exchange`) or the
sending (`shells`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, TypeVar, Unpack
from urllib.parse import quote

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.client.exchange import Call, Reply
from shoal.wire.arrays import Array

Floats = NDArray[np.float32]
Texts = str | Sequence[str] | Sequence[Sequence[int]]
OutputName = Literal["dense", "sparse"]


class Options(TypedDict, total=False):
    """What every call takes besides its own arguments.

    lane: a lane of the server's (`interactive` and `bulk`, unless it is told otherwise); left out,
    the server decides. timeout_s: time for the call with all its tries.
    deadline_s: time after which the server may drop the work; the timeout when left out.
    idempotency_key: a name of this request, for the server to run it once, however often it is
    tried; `auto` makes one for each call. Left out, none is sent: every call can be repeated, and
    a key costs the server a record.
    """

    lane: str
    idempotency_key: str
    timeout_s: float
    deadline_s: float


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """indices: uint32 [k], positions in the vocabulary. values: float32 [k]."""

    indices: NDArray[np.uint32]
    values: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """All outputs of an encoder, in the order of the texts. dense: float32 [n, d]."""

    model: str
    tokens: int
    dense: Floats | None
    sparse: list[SparseVector] | None


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document's place among the others; `index` is its position in the request."""

    index: int
    score: float
    document: str


@dataclass(frozen=True, slots=True)
class Classification:
    """The best label, its probability, and those of all labels, best first."""

    label: str
    score: float
    scores: dict[str, float]


class Model(msgspec.Struct, frozen=True):
    """A model of the server. outputs: kinds of vectors and their length."""

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
    licence: str | None = None
    description: str = ""


class _Usage(msgspec.Struct):
    total_tokens: int


class _Sparse(msgspec.Struct):
    indices: Array
    values: Array


class _Encoded(msgspec.Struct):
    model: str
    usage: _Usage
    dense: Array | None = None
    sparse: list[_Sparse] | None = None


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
    label: str
    scores: list[_Class]


class _Classified(msgspec.Struct):
    results: list[_OneClassified]


class _Models(msgspec.Struct):
    data: list[Model]


class Core:
    """The methods of both clients, as calls. `options` are the client's own defaults."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def encode(
        self,
        texts: Texts,
        model: str,
        *,
        prompt: str | None = None,
        truncate: bool = False,
        dimensions: int | None = None,
        normalize: bool | None = None,
        **options: Unpack[Options],
    ) -> Call[Floats]:
        """Dense vectors of texts (or of token ids): float32 [n, d].

        prompt: name of one of the model's prompts. truncate: cut an over-long text instead of
        refusing it. dimensions: keep so many leading dimensions. normalize: overrules the model's
        entry. Further arguments are those of `Options`.
        """
        body = _body(
            model=model,
            inputs=_inputs(texts),
            outputs=["dense"],
            prompt=prompt,
            truncate=truncate or None,
            dimensions=dimensions,
            normalize=normalize,
        )
        return self._post("/v1/encode", body, _dense, options)

    def encode_sparse(
        self,
        texts: Texts,
        model: str,
        *,
        prompt: str | None = None,
        truncate: bool = False,
        **options: Unpack[Options],
    ) -> Call[list[SparseVector]]:
        """Sparse vectors of texts. Arguments as in `encode`."""
        body = _body(
            model=model,
            inputs=_inputs(texts),
            outputs=["sparse"],
            prompt=prompt,
            truncate=truncate or None,
        )
        return self._post("/v1/encode", body, _sparse, options)

    def encode_outputs(
        self,
        texts: Texts,
        model: str,
        outputs: Sequence[OutputName] = ("dense", "sparse"),
        *,
        prompt: str | None = None,
        truncate: bool = False,
        **options: Unpack[Options],
    ) -> Call[Encoding]:
        """Several outputs of one pass, with the number of tokens. Arguments as in `encode`."""
        body = _body(
            model=model,
            inputs=_inputs(texts),
            outputs=list(outputs),
            prompt=prompt,
            truncate=truncate or None,
        )
        return self._post("/v1/encode", body, _encoding, options)

    def score(
        self,
        query: str,
        texts: Sequence[str],
        model: str,
        *,
        truncate: bool = False,
        **options: Unpack[Options],
    ) -> Call[Floats]:
        """How well each text answers the query, in the order of the texts: float32 [n]."""
        body = _body(model=model, query=query, texts=list(texts), truncate=truncate or None)
        return self._post("/v1/score", body, _scores, options)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        model: str,
        *,
        top_n: int | None = None,
        truncate: bool = False,
        **options: Unpack[Options],
    ) -> Call[list[Ranked]]:
        """The documents, best first; only `top_n` of them where it is given."""
        texts = list(documents)
        body = _body(
            model=model, query=query, documents=texts, top_n=top_n, truncate=truncate or None
        )

        def parse(reply: Reply) -> list[Ranked]:
            places = _decode(reply, _Reranked).results
            return [Ranked(p.index, p.relevance_score, texts[p.index]) for p in places]

        return self._post("/v1/rerank", body, parse, options)

    def classify(
        self,
        inputs: str | Sequence[str] | Sequence[tuple[str, str]],
        model: str,
        *,
        truncate: bool = False,
        **options: Unpack[Options],
    ) -> Call[list[Classification]]:
        """The labels of texts, or of pairs of texts, in their order."""
        body = _body(model=model, inputs=_inputs(inputs), truncate=truncate or None)
        return self._post("/v1/classify", body, _classes, options)

    def models(self) -> Call[list[Model]]:
        """All models of the server, by id."""
        return Call("GET", "/v1/models", lambda reply: _decode(reply, _Models).data)

    def model(self, name: str) -> Call[Model]:
        """One model, by id, alias, or either with `@revision`. Raises `UnknownModel`."""
        path = f"/v1/models/{quote(name, safe='/@')}"
        return Call("GET", path, lambda reply: _decode(reply, Model))

    def ready(self) -> Call[bool]:
        """Whether the server takes work. Raises `Unreachable` where none answers."""
        return Call(
            "GET", "/readyz", lambda reply: reply.status == 200, retry=False, good=(200, 503)
        )

    def _post(self, path: str, body: dict[str, Any], parse: Any, options: Any) -> Call[Any]:
        unknown = set(options) - Options.__annotations__.keys()
        if unknown:
            raise TypeError(f"unexpected argument {min(unknown)!r}")
        return Call("POST", path, parse, body, **{**self._options, **options})


S = TypeVar("S", bound=msgspec.Struct)


def _body(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _inputs(texts: Any) -> Any:
    return texts if isinstance(texts, str) else list(texts)


def _decode(reply: Reply, kind: type[S]) -> S:
    return msgspec.msgpack.decode(reply.content, type=kind)


def _numpy(array: Array) -> NDArray[Any]:
    dtype = np.dtype(array.dtype).newbyteorder("<")
    block = np.frombuffer(array.data, dtype).reshape(array.shape)
    return block.astype(array.dtype)  # a copy: the caller may write to it


def _dense(reply: Reply) -> Floats:
    encoded = _decode(reply, _Encoded)
    if encoded.dense is None:
        raise ValueError("the answer has no dense vectors")
    return _numpy(encoded.dense)


def _sparse(reply: Reply) -> list[SparseVector]:
    return [
        SparseVector(_numpy(one.indices), _numpy(one.values))
        for one in _decode(reply, _Encoded).sparse or []
    ]


def _encoding(reply: Reply) -> Encoding:
    encoded = _decode(reply, _Encoded)
    return Encoding(
        encoded.model,
        encoded.usage.total_tokens,
        None if encoded.dense is None else _numpy(encoded.dense),
        None if encoded.sparse is None else _sparse(reply),
    )


def _scores(reply: Reply) -> Floats:
    return _numpy(_decode(reply, _Scored).scores)


def _classes(reply: Reply) -> list[Classification]:
    return [
        Classification(one.label, one.scores[0].score, {c.label: c.score for c in one.scores})
        for one in _decode(reply, _Classified).results
    ]
