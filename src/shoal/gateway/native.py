"""The native routes of numbers: `/v1/encode`, `/v1/score`.

Owns their fields and answers. Does not own checks that all routes share (`ask`, `files`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shoal.errors import InvalidRequest
from shoal.gateway.ask import Ask, ModelName, TokenId, outputs_of
from shoal.gateway.failures import InputError, input_errors
from shoal.gateway.files import File, inputs_of
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
from shoal.gateway.respond import array_of, in_places, numbers, sparse_rows, token_rows
from shoal.wire.arrays import Array
from shoal.wire.envelope import Inputs, Params

OutputName = Literal["dense", "sparse", "multivector"]
_VECTOR = {"type": "array", "items": {"type": "number"}}
Matrix = Annotated[
    Any,
    Meta(
        description="One vector per input, null for one that failed; in MessagePack one block: "
        "{dtype, shape, data}, or a list of a block or null per input where one failed.",
        extra_json_schema={"type": "array", "items": {"anyOf": [_VECTOR, {"type": "null"}]}},
    ),
]
TokenVectors = Annotated[
    Any,
    Meta(
        description="The vectors of one input's tokens; in MessagePack one block.",
        extra_json_schema={"type": "array", "items": _VECTOR},
    ),
]


class EncodeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/encode."""

    model: ModelName
    inputs: Annotated[
        str | list[str | TokenId | list[TokenId] | File] | File,
        Meta(
            description="A text, a list of texts, token ids, a list of lists of token ids, a file, "
            "or a list of files."
        ),
    ]
    outputs: Annotated[
        list[OutputName] | None,
        Meta(description="What to return; null means the model's first output."),
    ] = None
    prompt: Prompt | None = None
    truncate: Truncate = False
    dimensions: Dimensions | None = None
    normalize: Normalize | None = None
    dtype: Annotated[
        Literal["float32", "float16", "int8", "binary"],
        Meta(
            description="Of dense vectors and token vectors; `binary` is a bit for each dimension, "
            "eight to a uint8."
        ),
    ] = "float32"


class Sparse(msgspec.Struct):
    """A sparse vector: positions in the vocabulary and their weights."""

    indices: Numbers
    values: Numbers


class EncodeResponse(msgspec.Struct, omit_defaults=True):
    """Answer of POST /v1/encode, in the order of the inputs."""

    model: str
    usage: Usage
    dense: Matrix | None = None
    sparse: list[Sparse | None] | None = None
    multivector: list[TokenVectors | None] | None = None
    errors: Annotated[
        list[InputError], Meta(description="Inputs that failed; not there when none did.")
    ] = []


def encode_job(body: EncodeRequest, ask: Ask) -> Job:
    """The job that a request asks for."""
    entry = ask.entry(body.model, "encode")
    inputs, refused = inputs_of(ask, entry, body.inputs, "inputs")
    outputs = outputs_of(
        body.outputs,
        list(entry.outputs),
        lambda name: (
            f"model `{entry.id}` gives no `{name}` output; it gives {', '.join(entry.outputs)}"
        ),
    )
    for name in ("dimensions", "normalize"):
        if getattr(body, name) is not None and "dense" not in outputs:
            raise InvalidRequest(f"`{name}` is for dense vectors, and none are asked", param=name)
    if body.dtype != "float32" and outputs == ["sparse"]:
        raise InvalidRequest("`dtype` is for dense vectors and token vectors", param="dtype")
    if body.dimensions is not None:
        check_dimensions(entry, body.dimensions)
    params = Params(
        outputs=outputs,
        prompt=body.prompt,
        truncate=body.truncate,
        dimensions=body.dimensions,
        normalize=body.normalize,
        dtype=body.dtype,
        partial=isinstance(body.inputs, list),
    )
    return ask.job("encode", entry, inputs, params, refused)


def encode_answer(body: EncodeRequest, job: Job, answer: Answer, form: Form) -> EncodeResponse:
    """The vectors, as blocks in MessagePack."""
    del body  # the job has its meaning
    result, failed = answer.result, answer.failures
    response = EncodeResponse(job.model, Usage(answer.tokens, answer.tokens))
    if "dense" in job.params.outputs:
        block = array_of(result, "dense")
        if failed:
            rows = [Array(block.dtype, block.shape[1:], row) for row in block.rows()]
            response.dense = in_places([numbers(row, form) for row in rows], failed)
        else:
            response.dense = numbers(block, form)
    if "sparse" in job.params.outputs:
        pairs = [Sparse(numbers(i, form), numbers(v, form)) for i, v in sparse_rows(result)]
        response.sparse = in_places(pairs, failed)
    if "multivector" in job.params.outputs:
        blocks = [numbers(block, form) for block in token_rows(result)]
        response.multivector = in_places(blocks, failed)
    response.errors = list(input_errors(failed).values())
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
        job.model,
        Usage(answer.tokens, answer.tokens),
        numbers(array_of(answer.result, "scores"), form),
    )
    if "logits" in arrays:
        response.logits = numbers(arrays["logits"], form)
    return response
