"""`/v1/classify`, and `/v1/moderations` in the shape of OpenAI's API.

Owns their fields and answers, and which labels of a guard model stand for nothing bad. Does not own
checks that all routes share (`ask`, `files`) or the scores.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from msgspec import Meta

from shoal.catalog.schema import Entry
from shoal.errors import Bug, InvalidRequest
from shoal.gateway.ask import Ask, ModelName, takes_pairs
from shoal.gateway.failures import InputError, input_errors
from shoal.gateway.files import File, all_inputs_of, inputs_of
from shoal.gateway.forms import Form
from shoal.gateway.jobs import Answer, Job
from shoal.gateway.openai import Truncate, Usage
from shoal.gateway.respond import array_of, floats, in_places
from shoal.wire.envelope import Inputs, Params, Result

FLAGGED: Final = 0.5
# Labels by which a guard says that nothing is wrong; every other label is a category of harm.
HARMLESS: Final = frozenset(
    ("safe", "sfw", "benign", "neutral", "normal", "none", "ok", "clean", "harmless", "legitimate")
)
# What a class is called where neither the files of a model nor its entry name it.
_UNNAMED: Final = re.compile(r"LABEL_\d+")


class ClassifyRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/classify."""

    model: ModelName
    inputs: Annotated[
        str | list[str | tuple[str, str] | File] | File,
        Meta(description="A text or a file; or a list of texts, of pairs of texts, or of files."),
    ]
    truncate: Truncate = False
    top_k: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Only so many of the best labels.")
    ] = None
    multi_label: Annotated[
        bool,
        Meta(
            description="Judge each label by itself: scores are the sigmoid of the logits, and "
            "`labels` has those of at least `threshold`. Refused where the model gives no logits."
        ),
    ] = False
    threshold: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="With `multi_label`: the least score of a label; null means 0.5."),
    ] = None


class Class(msgspec.Struct):
    """A label and its probability."""

    label: str
    score: float


class Classified(msgspec.Struct, omit_defaults=True):
    """One input's best label, and all labels, best first; or why there are none."""

    label: str = ""
    scores: list[Class] = []
    labels: Annotated[
        list[str] | None, Meta(description="With `multi_label`: all labels that apply.")
    ] = None
    error: InputError | None = None


class ClassifyResponse(msgspec.Struct):
    """Answer of POST /v1/classify, in the order of the inputs."""

    model: str
    usage: Usage
    results: list[Classified]


def classify_job(body: ClassifyRequest, ask: Ask) -> Job:
    """The job that a request asks for."""
    entry = ask.entry(body.model, "classify")
    given = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    pairs = bool(given) and isinstance(given[0], tuple)
    for i, one in enumerate(given):
        if isinstance(one, tuple) is not pairs:
            raise InvalidRequest(
                f"`inputs[{i}]` is of another kind than the entries before it; send texts, pairs "
                "or files, not a mixture",
                param=f"inputs[{i}]",
            )
    if body.threshold is not None and not body.multi_label:
        raise InvalidRequest("`threshold` is for `multi_label`", param="threshold")
    _check_head(entry, pairs=pairs)
    params = Params(truncate=body.truncate, partial=isinstance(body.inputs, list))
    if pairs:
        inputs = _pairs(cast("list[tuple[str, str]]", given), entry, ask)
        return ask.job("classify", entry, inputs, params)
    inputs, refused = inputs_of(ask, entry, body.inputs, "inputs")
    return ask.job("classify", entry, inputs, params, refused)


def _pairs(given: list[tuple[str, str]], entry: Entry, ask: Ask) -> Inputs:
    if "text" not in entry.inputs:
        raise InvalidRequest(
            f"model `{entry.id}` takes {' or '.join(entry.inputs)}, not pairs of texts",
            param="inputs",
        )
    ask.count(given, "inputs")
    for i, pair in enumerate(given):
        for j, text in enumerate(pair):
            ask.text(text, f"inputs[{i}][{j}]")
    return Inputs(texts=[second for _, second in given], firsts=[first for first, _ in given])


def _check_head(entry: Entry, *, pairs: bool) -> None:
    """A head says whether it reads one text or two; a joint classifier takes what it is given."""
    head = entry.heads.get("classify")
    if head is not None and takes_pairs(entry) is not pairs:
        wants = "pairs of texts: [[first, second], ...]" if head.kind == "pair" else "single texts"
        raise InvalidRequest(f"model `{entry.id}` classifies {wants}", param="inputs")


def classify_answer(
    body: ClassifyRequest, job: Job, answer: Answer, form: Form
) -> ClassifyResponse:
    """Every input's labels, best first."""
    del form  # a float is a float in both
    if body.multi_label and "logits" not in answer.result.arrays:
        raise InvalidRequest(
            f"model `{job.entry.id}` gives probabilities of labels that exclude each other, and no "
            "logits by which to judge each label by itself",
            param="multi_label",
        )
    errors = input_errors(answer.failures)
    rows = in_places(_classes(answer.result, independent=body.multi_label), errors)
    results = [
        Classified(error=errors[at]) if row is None else _classified(body, row)
        for at, row in enumerate(rows)
    ]
    return ClassifyResponse(job.model, Usage(answer.tokens, answer.tokens), results)


def _classified(body: ClassifyRequest, classes: list[Class]) -> Classified:
    least = FLAGGED if body.threshold is None else body.threshold
    labels = [one.label for one in classes if one.score >= least]
    return Classified(classes[0].label, classes[: body.top_k], labels if body.multi_label else None)


def _classes(result: Result, *, independent: bool = False) -> list[list[Class]]:
    labels = result.labels
    rows = floats(array_of(result, "logits" if independent else "scores"))
    if any(len(row) != len(labels) for row in rows) or not labels:
        raise Bug(f"{len(labels)} labels for rows of {[len(row) for row in rows[:3]]} scores")
    if independent:
        rows = [[_sigmoid(logit) for logit in row] for row in rows]
    return [
        sorted(map(Class, labels, row), key=lambda one: one.score, reverse=True) for row in rows
    ]


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0  # exp would overflow


class Address(msgspec.Struct, forbid_unknown_fields=True):
    """Where OpenAI's API has a picture."""

    url: Annotated[str, Meta(description="A `data:` URI; nothing is fetched from addresses.")]


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of one input: a text or a picture."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: Address | None = None


class ModerationsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/moderations."""

    input: Annotated[
        str | list[str | ContentPart],
        Meta(description="A text, a list of texts, or the one part of an input in OpenAI's form."),
    ]
    model: Annotated[
        ModelName,
        Meta(description="A model that classifies; the default is an alias that a guard may have."),
    ] = "omni-moderation-latest"
    truncate: Annotated[
        bool,
        Meta(
            description="Judge only the beginning of a text that is longer than the guard reads; "
            "false refuses it, for what was not read is not cleared."
        ),
    ] = False


class Moderation(msgspec.Struct):
    """What a guard says of one input: each label of harm, and whether any reaches one half."""

    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]
    category_applied_input_types: dict[str, list[str]]


class ModerationsResponse(msgspec.Struct):
    """Answer of POST /v1/moderations, in the order of the inputs."""

    id: str
    model: str
    results: list[Moderation]


def moderations_job(body: ModerationsRequest, ask: Ask) -> Job:
    """The job that a request asks for."""
    entry = ask.entry(body.model, "classify")
    _check_head(entry, pairs=False)
    given: Any = body.input
    if isinstance(given, list) and any(isinstance(one, ContentPart) for one in given):
        if len(given) > 1:
            raise InvalidRequest(
                "`input` has several parts, and a guard reads one; send a request for each",
                param="input",
            )
        given = _content(given[0])
    inputs = all_inputs_of(ask, entry, given, "input")
    return ask.job("classify", entry, inputs, Params(truncate=body.truncate))


def _content(part: ContentPart) -> str:
    url = None if part.image_url is None else part.image_url.url
    content = part.text if part.type == "text" else url
    if content is None:
        raise InvalidRequest(f"`input[0].{part.type}` is required", param=f"input[0].{part.type}")
    return content


def moderations_answer(
    body: ModerationsRequest, job: Job, answer: Answer, form: Form
) -> ModerationsResponse:
    """The labels of harm with their scores.

    Raises `InvalidRequest` for a model whose classes have no names: one of them says that nothing
    is wrong, and nobody can tell which.
    """
    del body, form
    unnamed = next(filter(_UNNAMED.fullmatch, answer.result.labels), None)
    if unnamed is not None:
        raise InvalidRequest(
            f"the classes of model `{job.entry.id}` have no names (`{unnamed}`), so that harm "
            "cannot be told from what is harmless; its catalog entry can name them: `labels`",
            param="model",
        )
    kind = "image" if job.inputs.blobs else "text"
    results = []
    for classes in _classes(answer.result):
        scores = {c.label: c.score for c in classes if c.label.casefold() not in HARMLESS}
        results.append(_moderation(scores, kind))
    return ModerationsResponse(f"modr-{job.request_id}", job.model, results)


def _moderation(scores: Mapping[str, float], kind: str) -> Moderation:
    over = {label: score >= FLAGGED for label, score in scores.items()}
    return Moderation(any(over.values()), over, dict(scores), {label: [kind] for label in scores})
