"""`/v1/extract`: what is in a text, a picture, a document or a sound, as structures.

Owns its fields and answers. Does not own how anything is found (the runtimes), the structures
between them (`shoal.wire.records`) or checks that all routes share (`ask`, `files`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from shoal.catalog.schema import Entry
from shoal.core.spelling import did_you_mean
from shoal.errors import Bug, InvalidRequest
from shoal.gateway.ask import Ask, ModelName, outputs_of
from shoal.gateway.failures import InputError, input_errors
from shoal.gateway.files import File, inputs_of
from shoal.gateway.forms import Form
from shoal.gateway.jobs import Answer, Job
from shoal.gateway.openai import Usage
from shoal.gateway.respond import in_places
from shoal.wire.envelope import Params
from shoal.wire.records import Page, Record, Segment, unpack

ExtractName = Literal["entities", "text", "layout", "speech"]
Label = Annotated[str, Meta(min_length=1, max_length=128)]
_LABELLED = {"entities", "layout"}


class ExtractRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/extract."""

    model: ModelName
    inputs: Annotated[
        str | list[str | File] | File,
        Meta(description="A text or a file, or a list of either; the model's card says which."),
    ]
    outputs: Annotated[
        list[ExtractName] | None,
        Meta(description="What to return; null means the first that the model finds."),
    ] = None
    labels: Annotated[
        Annotated[list[Label], Meta(max_length=256)] | None,
        Meta(description="Only entities or regions with these labels."),
    ] = None
    threshold: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="Only what scores so much; null leaves it to the model."),
    ] = None


class EntityFound(msgspec.Struct):
    """A stretch of the text: characters (code points) from `start` to before `end`."""

    label: str
    text: str
    start: int
    end: int
    score: float


class Extracted(msgspec.Struct, omit_defaults=True):
    """What was found in one input, by output; or why nothing could be."""

    entities: list[EntityFound] | UnsetType = UNSET
    text: Annotated[
        str | UnsetType, Meta(description="All lines of all pages, in reading order.")
    ] = UNSET
    pages: Annotated[
        list[Page] | UnsetType,
        Meta(description="Lines and regions with their places, in pixels of each page."),
    ] = UNSET
    segments: list[Segment] | UnsetType = UNSET
    duration_s: float | UnsetType = UNSET
    error: InputError | None = None


class ExtractResponse(msgspec.Struct):
    """Answer of POST /v1/extract, in the order of the inputs."""

    model: str
    usage: Usage
    results: list[Extracted]


def extract_job(body: ExtractRequest, ask: Ask) -> Job:
    """The job that a request asks for."""
    entry = ask.entry(body.model, "extract")
    outputs = outputs_of(
        body.outputs,
        entry.extracts,
        lambda name: f"model `{entry.id}` finds no `{name}`; it finds {', '.join(entry.extracts)}",
    )
    labels = list(dict.fromkeys(body.labels or []))
    if body.labels is not None:
        _check_labels(entry, labels, outputs)
    inputs, refused = inputs_of(ask, entry, body.inputs, "inputs")
    params = Params(
        outputs=outputs,
        labels=labels,
        threshold=body.threshold,
        partial=isinstance(body.inputs, list),
    )
    return ask.job("extract", entry, inputs, params, refused)


def _check_labels(entry: Entry, labels: Sequence[str], outputs: Sequence[str]) -> None:
    """The catalog may leave a model's labels to its files; then its runtime checks them."""
    if not labels:
        raise InvalidRequest("`labels` is empty", param="labels")
    if not _LABELLED.intersection(outputs):
        raise InvalidRequest(f"`{outputs[0]}` has no labels to choose from", param="labels")
    for i, label in enumerate(labels):
        if entry.labels and label not in entry.labels:
            guess = did_you_mean(label, entry.labels) or f"; known: {', '.join(entry.labels)[:300]}"
            raise InvalidRequest(
                f"model `{entry.id}` has no label `{label}`{guess}", param=f"labels[{i}]"
            )


def extract_answer(body: ExtractRequest, job: Job, answer: Answer, form: Form) -> ExtractResponse:
    """Every input's record, in its place."""
    del body, form
    records = [unpack(record) for record in answer.result.records]
    given: Sequence[str | bytes] = job.inputs.texts or job.inputs.blobs
    errors = input_errors(answer.failures)
    well = len(given) + len(job.refused) - len(errors)
    if len(records) != well:
        raise Bug(f"{len(records)} records for {well} inputs")
    texts = in_places(job.inputs.texts or [""] * len(given), job.refused)
    results = [
        Extracted(error=errors[at])
        if record is None
        else _extracted(record, texts[at] or "", job.params.outputs)
        for at, record in enumerate(in_places(records, errors))
    ]
    return ExtractResponse(job.model, Usage(answer.tokens, answer.tokens), results)


def _extracted(record: Record, text: str, outputs: Sequence[str]) -> Extracted:
    found = Extracted()
    if "entities" in outputs:
        found.entities = [
            EntityFound(one.label, text[one.start : one.end], one.start, one.end, one.score)
            for one in record.entities
        ]
    if "text" in outputs or "layout" in outputs:
        found.pages = record.pages
    if "text" in outputs:
        found.text = "\n".join(line.text for page in record.pages for line in page.lines)
    if "speech" in outputs:
        found.segments = record.segments
        found.duration_s = record.duration_s
    return found
