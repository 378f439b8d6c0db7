"""The native routes: `/v1/encode`, `/v1/score`, `/v1/classify`.

Owns their fields and answers. Does not own checks that all routes share (`ask`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from shoal.catalog.schema import Entry
from shoal.errors import Bug, InvalidRequest
from shoal.gateway.ask import Ask, ModelName, TextsOrIds
from shoal.gateway.forms import Form
from shoal.gateway.jobs import Answer, Job
from shoal.gateway.openai import (
    Dimensions,
    Normalize,
    Numbers,
    Prompt,
    Truncate,
    Usage,
    check_dimensions,
)
from shoal.gateway.rerank import Document, document_texts
from shoal.gateway.respond import array_of, floats, numbers, sparse_rows
from shoal.wire.envelope import Inputs, Params, Result

OutputName = Literal["dense", "sparse"]
Matrix = Annotated[
    Any,
    Meta(
        description="One vector per input; in MessagePack one block: {dtype, shape, data}.",
        extra_json_schema={
            "type": "array",
            "items": {"type": "array", "items": {"type": "number"}},
        },
    ),
]


class EncodeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/encode."""

    model: ModelName
    inputs: Annotated[
        TextsOrIds,
        Meta(description="A text, a list of texts, token ids, or a list of lists of token ids."),
    ]
    outputs: Annotated[
        list[OutputName] | None,
        Meta(description="What to return; null means the model's first output."),
    ] = None
    prompt: Prompt | None = None
    truncate: Truncate = False
    dimensions: Dimensions | None = None
    normalize: Normalize | None = None


class Sparse(msgspec.Struct):
    """A sparse vector: positions in the vocabulary and their weights."""

    indices: Numbers
    values: Numbers


class EncodeResponse(msgspec.Struct, omit_defaults=True):
    """Answer of POST /v1/encode, in the order of the inputs."""

    model: str
    usage: Usage
    dense: Matrix | None = None
    sparse: list[Sparse] | None = None


def encode_job(body: EncodeRequest, ask: Ask) -> Job:
    """The job that a request asks for."""
    entry = ask.entry(body.model, "encode")
    inputs = ask.texts_or_ids(body.inputs, "inputs")
    outputs = _outputs(entry, body.outputs)
    for name in ("dimensions", "normalize"):
        if getattr(body, name) is not None and "dense" not in outputs:
            raise InvalidRequest(f"`{name}` is for dense vectors, and none are asked", param=name)
    if body.dimensions is not None:
        check_dimensions(entry, body.dimensions)
    params = Params(
        outputs=outputs,
        prompt=body.prompt,
        truncate=body.truncate,
        dimensions=body.dimensions,
        normalize=body.normalize,
    )
    return ask.job("encode", entry, inputs, params)


def _outputs(entry: Entry, wanted: list[OutputName] | None) -> list[str]:
    if wanted is None:
        return [str(name) for name in entry.outputs][:1]
    if not wanted:
        raise InvalidRequest("`outputs` is empty", param="outputs")
    for i, name in enumerate(wanted):
        if name not in entry.outputs:
            raise InvalidRequest(
                f"model `{entry.id}` gives no `{name}` output; it gives {', '.join(entry.outputs)}",
                param=f"outputs[{i}]",
            )
    return [str(name) for name in dict.fromkeys(wanted)]


def encode_answer(body: EncodeRequest, job: Job, answer: Answer, form: Form) -> EncodeResponse:
    """The vectors, as blocks in MessagePack."""
    del body  # the job has its meaning
    response = EncodeResponse(job.entry.id, Usage(answer.tokens, answer.tokens))
    if "dense" in job.params.outputs:
        response.dense = numbers(array_of(answer.result, "dense"), form)
    if "sparse" in job.params.outputs:
        response.sparse = [
            Sparse(numbers(indices, form), numbers(values, form))
            for indices, values in sparse_rows(answer.result)
        ]
    return response


class ScoreRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/score: how well each text answers the query."""

    model: ModelName
    query: Annotated[str, Meta(description="What each text is scored against.")]
    texts: Annotated[list[str | Document] | None, Meta(description="Texts to score.")] = None
    documents: Annotated[
        list[str | Document] | None, Meta(description="Another name of `texts`; give one.")
    ] = None
    truncate: Truncate = False


class ScoreResponse(msgspec.Struct, omit_defaults=True):
    """Answer of POST /v1/score, in the order of the texts."""

    model: str
    usage: Usage
    scores: Numbers
    logits: Annotated[
        Numbers | None,
        Meta(description="Raw scores, where the model has them: they order without saturating."),
    ] = None


def score_job(body: ScoreRequest, ask: Ask) -> Job:
    """The job that a request asks for."""
    entry = ask.entry(body.model, "score")
    if body.texts is not None and body.documents is not None:
        raise InvalidRequest("give `texts` or `documents`, not both", param="documents")
    name = "texts" if body.documents is None else "documents"
    given = body.documents if body.texts is None else body.texts
    if given is None:
        raise InvalidRequest("`texts` is required", param="texts")
    query = ask.text(body.query, "query")
    inputs = Inputs(texts=ask.texts(document_texts(given), name), query=query)
    return ask.job("score", entry, inputs, Params(truncate=body.truncate))


def score_answer(body: ScoreRequest, job: Job, answer: Answer, form: Form) -> ScoreResponse:
    """The scores, as blocks in MessagePack."""
    del body
    arrays = answer.result.arrays
    response = ScoreResponse(
        job.entry.id,
        Usage(answer.tokens, answer.tokens),
        numbers(array_of(answer.result, "scores"), form),
    )
    if "logits" in arrays:
        response.logits = numbers(arrays["logits"], form)
    return response


class ClassifyRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/classify."""

    model: ModelName
    inputs: Annotated[
        str | list[str | tuple[str, str]],
        Meta(description="A text, or a list of texts, or a list of pairs of texts."),
    ]
    truncate: Truncate = False


class Class(msgspec.Struct):
    """A label and its probability."""

    label: str
    score: float


class Classified(msgspec.Struct):
    """One input's best label, and all labels, best first."""

    label: str
    scores: list[Class]


class ClassifyResponse(msgspec.Struct):
    """Answer of POST /v1/classify, in the order of the inputs."""

    model: str
    usage: Usage
    results: list[Classified]


def classify_job(body: ClassifyRequest, ask: Ask) -> Job:
    """The job that a request asks for."""
    entry = ask.entry(body.model, "classify")
    given = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    pairs = bool(given) and not isinstance(given[0], str)
    for i, one in enumerate(given):
        if isinstance(one, str) is pairs:
            raise InvalidRequest(
                f"`inputs[{i}]` is of another kind than the entries before it; send texts or "
                "pairs, not a mixture",
                param=f"inputs[{i}]",
            )
    _check_head(entry, pairs=pairs)
    if not pairs:
        field = "inputs"
        if isinstance(body.inputs, str):
            inputs = Inputs(texts=[ask.text(body.inputs, field)])
        else:
            inputs = Inputs(texts=ask.texts(given, field))
    else:
        inputs = _pairs(cast("list[tuple[str, str]]", given), ask)
    return ask.job("classify", entry, inputs, Params(truncate=body.truncate))


def _pairs(given: list[tuple[str, str]], ask: Ask) -> Inputs:
    ask.count(given, "inputs")
    for i, pair in enumerate(given):
        for j, text in enumerate(pair):
            ask.text(text, f"inputs[{i}][{j}]")
    return Inputs(texts=[second for _, second in given], firsts=[first for first, _ in given])


def _check_head(entry: Entry, *, pairs: bool) -> None:
    """A head says whether it reads one text or two; a joint classifier takes what it is given."""
    head = entry.heads.get("classify")
    if head is not None and (head.kind == "pair") is not pairs:
        wants = "pairs of texts: [[first, second], ...]" if head.kind == "pair" else "single texts"
        raise InvalidRequest(f"model `{entry.id}` classifies {wants}", param="inputs")


def classify_answer(
    body: ClassifyRequest, job: Job, answer: Answer, form: Form
) -> ClassifyResponse:
    """Every input's labels, best first."""
    del body, form
    results = [Classified(classes[0].label, classes) for classes in _classes(answer.result)]
    return ClassifyResponse(job.entry.id, Usage(answer.tokens, answer.tokens), results)


def _classes(result: Result) -> list[list[Class]]:
    labels = result.labels
    rows = floats(array_of(result, "scores"))
    if any(len(row) != len(labels) for row in rows) or not labels:
        raise Bug(f"{len(labels)} labels for rows of {[len(row) for row in rows[:3]]} scores")
    return [
        sorted(map(Class, labels, row), key=lambda one: one.score, reverse=True) for row in rows
    ]
