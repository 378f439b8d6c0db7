"""`/v1/rerank` in the shape that Cohere's and Jina's clients share.

Owns its fields, the order of the results and both ways of counting usage. Does not own scoring.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shoal.gateway.ask import Ask, ModelName
from shoal.gateway.forms import Form
from shoal.gateway.jobs import Answer, Job
from shoal.gateway.openai import Truncate, Usage
from shoal.gateway.respond import array_of, floats
from shoal.wire.envelope import Inputs, Params


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """A document as an object."""

    text: str


class RerankRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/rerank."""

    model: ModelName
    query: Annotated[str, Meta(description="What the documents are ranked for.")]
    documents: Annotated[list[str | Document], Meta(description="Texts, or objects with a `text`.")]
    top_n: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Return only so many of the best.")
    ] = None
    return_documents: Annotated[
        bool, Meta(description="Repeat each document's text in its result.")
    ] = False
    truncate: Truncate = False


class Ranked(msgspec.Struct, omit_defaults=True):
    """One document's place: `index` is its position in the request."""

    index: int
    relevance_score: float
    document: Document | None = None


class Tokens(msgspec.Struct):
    """Tokens as Cohere counts them."""

    input_tokens: int


class RerankMeta(msgspec.Struct):
    """Cohere's place for usage."""

    tokens: Tokens


class RerankResponse(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/rerank: best first."""

    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[Ranked]
    usage: Usage
    meta: RerankMeta


def rerank_job(body: RerankRequest, ask: Ask) -> Job:
    """The job that a request asks for."""
    entry = ask.entry(body.model, "score")
    query = ask.text(body.query, "query")
    texts = ask.texts(document_texts(body.documents), "documents")
    inputs = Inputs(texts=texts, query=query)
    return ask.job("score", entry, inputs, Params(truncate=body.truncate))


def rerank_answer(body: RerankRequest, job: Job, answer: Answer, form: Form) -> RerankResponse:
    """The documents, best first.

    They are ordered by the raw logit where the model gives one, because probabilities saturate;
    equal ones keep the order of the request.
    """
    del form  # a float is a float in both
    arrays = answer.result.arrays
    scores = floats(array_of(answer.result, "scores"))
    keys = floats(arrays["logits"]) if "logits" in arrays else scores
    order = sorted(range(len(scores)), key=lambda i: -keys[i])[: body.top_n]
    texts = job.inputs.texts
    results = [
        Ranked(i, scores[i], Document(texts[i]) if body.return_documents else None) for i in order
    ]
    return RerankResponse(
        id=job.request_id,
        model=job.model,
        results=results,
        usage=Usage(answer.tokens, answer.tokens),
        meta=RerankMeta(Tokens(answer.tokens)),
    )


def document_texts(documents: list[str | Document]) -> list[str]:
    """The texts of documents in either shape."""
    return [d if isinstance(d, str) else d.text for d in documents]
