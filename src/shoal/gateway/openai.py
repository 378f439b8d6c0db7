"""`/v1/embeddings` and `/v1/models` in the shapes of OpenAI's API.

Owns their fields and answers. Does not own checks that all routes share (`ask`) or the error shape
(`failures`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, structs

from shoal.catalog.schema import Adapter, Entry
from shoal.catalog.snapshot import Snapshot
from shoal.core.types import Task
from shoal.errors import InvalidRequest
from shoal.gateway.ask import Ask, ModelName, TextsOrIds, endpoints
from shoal.gateway.files import all_inputs_of
from shoal.gateway.forms import Form
from shoal.gateway.jobs import Answer, Job
from shoal.gateway.respond import base64, dense_rows, numbers
from shoal.wire.arrays import Array
from shoal.wire.envelope import ModelState, Params

Dimensions = Annotated[
    int,
    Meta(ge=1, description="Keep this many leading dimensions of each vector."),
]
Truncate = Annotated[
    bool,
    Meta(description="Cut an input that is longer than the model reads; false refuses it."),
]
Normalize = Annotated[
    bool, Meta(description="Scale vectors to length 1; null leaves it to the model's entry.")
]
Prompt = Annotated[
    str, Meta(description="Name of one of the model's prompts, put before each input.")
]
Numbers = Annotated[
    Any,
    Meta(
        description="Numbers; in MessagePack a block: {dtype, shape, data}.",
        extra_json_schema={"type": "array", "items": {}},
    ),
]


class EmbeddingsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/embeddings."""

    model: ModelName
    input: Annotated[
        TextsOrIds,
        Meta(
            description="A text, a list of texts, token ids, or a list of lists of token ids; for "
            "a model that takes images, `data:` URIs."
        ),
    ]
    encoding_format: Annotated[
        Literal["float", "base64"],
        Meta(description="`base64` is little-endian float32."),
    ] = "float"
    dimensions: Dimensions | None = None
    user: Annotated[str | None, Meta(description="Accepted for compatibility; not used.")] = None
    truncate: Truncate = False
    prompt: Prompt | None = None
    normalize: Normalize | None = None


class Usage(msgspec.Struct):
    """Tokens that the model read, special tokens included."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, kw_only=True):
    """The vector of one input."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: Annotated[
        Any,
        Meta(
            description="Numbers, or base64 of little-endian float32.",
            extra_json_schema={
                "anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]
            },
        ),
    ]


class EmbeddingsResponse(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/embeddings, in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage


def embeddings_job(body: EmbeddingsRequest, ask: Ask) -> Job:
    """The job that a request asks for."""
    entry = ask.entry(body.model, "encode")
    inputs = all_inputs_of(ask, entry, body.input, "input")
    check_dimensions(entry, body.dimensions)
    params = Params(
        outputs=["dense"],
        prompt=body.prompt,
        truncate=body.truncate,
        dimensions=body.dimensions,
        normalize=body.normalize,
    )
    return ask.job("encode", entry, inputs, params)


def embeddings_answer(
    body: EmbeddingsRequest, job: Job, answer: Answer, form: Form
) -> EmbeddingsResponse:
    """The answer in OpenAI's shape."""
    rows = dense_rows(answer.result)
    if body.encoding_format == "base64":
        data = [Embedding(index=i, embedding=base64(row, form)) for i, row in enumerate(rows)]
    else:
        data = [
            Embedding(index=i, embedding=numbers(Array("float32", [len(row) // 4], row), form))
            for i, row in enumerate(rows)
        ]
    return EmbeddingsResponse(data=data, model=job.model, usage=Usage(answer.tokens, answer.tokens))


def check_dimensions(entry: Entry, dimensions: int | None) -> None:
    """Raises `InvalidRequest` unless the entry gives dense vectors of so many dimensions."""
    dense = entry.outputs.get("dense")
    if dense is None:
        raise InvalidRequest(
            f"model `{entry.id}` gives no dense vectors, only {', '.join(entry.outputs)}; "
            "/v1/encode gives those",
            param="model",
        )
    if dimensions is not None and dimensions > dense.dim:
        raise InvalidRequest(
            f"`dimensions` is {dimensions}; vectors of `{entry.id}` have {dense.dim}",
            param="dimensions",
        )


class ModelCard(msgspec.Struct, kw_only=True):
    """A model as /v1/models shows it: OpenAI's fields, then what Shoal knows of it.

    `created` is 0: a catalog entry has no date. `state` is what the fleet last said. An adapter is
    a model of its own, whose `parent` is the model that it was made for.
    """

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: Literal["shoal"] = "shoal"
    parent: Annotated[str | None, Meta(description="Of an adapter: its model's id.")] = None
    revision: str
    aliases: list[str]
    tasks: list[Task]
    inputs: Annotated[list[str], Meta(description="What an input may be.")]
    endpoints: list[str]
    max_tokens: int
    outputs: Annotated[dict[str, int], Meta(description="Kinds of vectors, and their length.")]
    prompts: list[str]
    extracts: Annotated[list[str], Meta(description="What /v1/extract can return.")]
    labels: Annotated[list[str], Meta(description="Class names, as far as the catalog has them.")]
    runtime: str
    state: str
    memory_bytes: Annotated[int, Meta(description="Of one copy, as measured; 0 while unknown.")]
    licence: str | None
    description: str


class ModelList(msgspec.Struct, kw_only=True):
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def model_list(catalog: Snapshot, states: Mapping[str, ModelState]) -> ModelList:
    """All models by id, then all adapters."""
    cards = [_card(entry, states) for entry in catalog.entries]
    by_id = {card.id: card for card in cards}
    resident = _resident_adapters(states)
    cards += [_adapted(by_id[each.base], each, resident) for each in catalog.adapters]
    return ModelList(data=cards)


def model_card(catalog: Snapshot, name: str, states: Mapping[str, ModelState]) -> ModelCard:
    """The model, or the adapter, of a name. Raises `UnknownModel`."""
    named = catalog.find(name)
    card = _card(named.entry, states)
    if named.adapter is None:
        return card
    return _adapted(card, named.adapter, _resident_adapters(states))


def _resident_adapters(states: Mapping[str, ModelState]) -> dict[str, int]:
    """The adapters that are loaded anywhere, by key, and the bytes that each takes."""
    return {each.adapter: each.memory_bytes for s in states.values() for each in s.adapters}


def _adapted(base: ModelCard, adapter: Adapter, resident: Mapping[str, int]) -> ModelCard:
    return structs.replace(
        base,
        id=adapter.id,
        parent=base.id,
        revision=adapter.revision,
        aliases=[],
        state="resident" if adapter.key in resident else "cold",
        memory_bytes=resident.get(adapter.key, 0),
        licence=adapter.licence,
        description=adapter.description,
    )


def _card(entry: Entry, states: Mapping[str, ModelState]) -> ModelCard:
    classes = entry.heads.get("classify")
    state = states.get(entry.key) or ModelState(entry.key, "cold")
    return ModelCard(
        id=entry.id,
        revision=entry.revision,
        tasks=list(entry.tasks),
        inputs=list(entry.inputs),
        extracts=list(entry.extracts),
        endpoints=endpoints(entry),
        max_tokens=entry.max_tokens,
        runtime=entry.runtime,
        state=state.state,
        memory_bytes=state.memory_bytes,
        aliases=list(entry.aliases),
        outputs={name: output.dim for name, output in entry.outputs.items()},
        prompts=list(entry.prompts),
        labels=list(entry.labels if classes is None else classes.labels),
        licence=entry.licence,
        description=entry.description,
    )
