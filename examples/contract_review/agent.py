"""The review of a contract: steps, each with its model and the steps that it needs.

Owns the steps and running them, for many contracts at once. Does not own the notes of calls
(`calls`), joining lines (`paragraphs`) or what is made of findings (`findings`).

A step starts as soon as what it needs is there, so the steps of all contracts are with the server
together, and the server makes batches of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from examples.contract_review import findings, paragraphs
from examples.contract_review.calls import Desk
from examples.contract_review.findings import PII, Findings, Match
from examples.contract_review.library import CLAUSES, KNOWN_INJECTIONS
from shoal.client import AsyncClient, SparseVector
from shoal.wire.records import Page

FILE_TYPE = "magika"
IMAGE_GUARD = "open-nsfw"
OCR = "pp-ocrv6"
LAYOUT = "picodet-layout-cdla"
PERSONAL_DATA = "pii-rampart"
ENTITIES = "en-core-web-sm"
EMBEDDER = "all-minilm-l6-v2"
TERMS = "splade-tiny"
RERANKER = "all-minilm-l6-v2-maxsim"
SCREEN = "all-minilm-l6-v2-int8"
GUARD = "nanoguard"
GENERATOR = "smollm2-135m-instruct"

# How many clauses each of the two retrievers puts forward.
_CANDIDATES = 3
# The wordings of the library's clauses score 0.52 and more with their clause, and the paragraphs
# that are no clause 0.38 and less.
_LEAST_MATCH = 0.45
# Paragraphs of contracts have a cosine of at most 0.25 with a known injection, and its like 0.58.
_SCREENED = 0.3
_TO_REWRITE = (
    "Rewrite these notes on a contract as one short paragraph for a busy manager. Add nothing.\n\n"
    "Notes: "
)
_SUMMARY_TOKENS = 120

Floats = NDArray[np.float32]
T = TypeVar("T")


@dataclass(slots=True)
class Review:
    """A document under review: the file, what the steps have left, and the findings."""

    name: str
    blob: bytes
    desk: Desk
    library: Library
    found: Findings
    lines: list[Page] = field(default_factory=list)
    regions: list[Page] = field(default_factory=list)
    vectors: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    terms: list[SparseVector] = field(default_factory=list)
    screened: list[str] = field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        """All paragraphs, headings too."""
        return [one.text for one in self.found.paragraphs]

    @property
    def body(self) -> list[str]:
        """The paragraphs that are no heading."""
        return [one.text for one in self.found.paragraphs if not one.heading]

    async def ask(
        self, step: Step, request: Callable[[], Awaitable[T]], inputs: Sequence[str | bytes]
    ) -> T:
        """One call of a step."""
        return await self.desk.ask(request, (self.name, step.name, step.model), inputs)


@dataclass(frozen=True, slots=True)
class Library:
    """The vectors of the library's clauses, [clauses, d] and sparse, and of known injections."""

    clauses: Floats
    terms: list[dict[int, float]]
    injections: Floats


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the review. model: the one that it asks, or nothing. needs: names of steps."""

    name: str
    model: str
    needs: tuple[str, ...]
    run: Callable[[Step, Review], Awaitable[None]]


async def _file_type(step: Step, review: Review) -> None:
    blob, client = review.blob, review.desk.client
    (kind,) = await review.ask(step, lambda: client.classify(blob, step.model, top_k=1), [blob])
    review.found.file_type = kind.label


async def _image_guard(step: Step, review: Review) -> None:
    if review.found.file_type != "png":
        return
    blob, client = review.blob, review.desk.client
    (verdict,) = await review.ask(step, lambda: client.classify(blob, step.model), [blob])
    review.found.image = verdict.label


async def _ocr(step: Step, review: Review) -> None:
    if review.found.file_type == "txt":
        return
    blob, client = review.blob, review.desk.client
    (read,) = await review.ask(
        step, lambda: client.extract(blob, step.model, outputs=["text"]), [blob]
    )
    review.lines = read.pages


async def _layout(step: Step, review: Review) -> None:
    if review.found.file_type == "txt":
        return
    blob, client = review.blob, review.desk.client
    (read,) = await review.ask(
        step, lambda: client.extract(blob, step.model, outputs=["layout"]), [blob]
    )
    review.regions = read.pages


async def _paragraphs(_: Step, review: Review) -> None:
    if review.found.file_type == "txt":
        review.found.paragraphs = paragraphs.from_text(review.blob.decode())
    else:
        review.found.paragraphs = paragraphs.from_pages(review.lines, review.regions)


async def _personal_data(step: Step, review: Review) -> None:
    texts, client = review.texts, review.desk.client
    results = await review.ask(
        step, lambda: client.extract(texts, step.model, labels=list(PII)), texts
    )
    for text, result in zip(texts, results, strict=True):
        review.found.pii += findings.personal_data(text, result.entities)


async def _entities(step: Step, review: Review) -> None:
    opening, client = review.body[:1], review.desk.client
    (result,) = await review.ask(
        step, lambda: client.extract(opening, step.model, labels=["ORG"]), opening
    )
    review.found.parties = [entity.text for entity in result.entities]


async def _embed(step: Step, review: Review) -> None:
    texts, client = review.body, review.desk.client
    review.vectors = await review.ask(step, lambda: client.encode(texts, step.model), texts)


async def _weigh(step: Step, review: Review) -> None:
    texts, client = review.body, review.desk.client
    review.terms = await review.ask(step, lambda: client.encode_sparse(texts, step.model), texts)


async def _rerank(step: Step, review: Review) -> None:
    """The candidates of both retrievers, judged by a third model."""
    client, library = review.desk.client, review.library

    async def judge(text: str, similar: Floats, terms: SparseVector) -> Match | None:
        shared = np.array([_dot(terms, clause) for clause in library.terms])
        ids = sorted({*_best(similar), *_best(shared)})
        candidates = [CLAUSES[at].text for at in ids]
        (best,) = await review.ask(
            step,
            lambda: client.rerank(text, candidates, step.model, top_n=1),
            [text, *candidates],
        )
        if best.score < _LEAST_MATCH:
            return None
        return Match(text, CLAUSES[ids[best.index]], best.score)

    similarities = review.vectors @ library.clauses.T
    judged = await asyncio.gather(
        *map(judge, review.body, similarities, review.terms),
    )
    review.found.matches = [match for match in judged if match is not None]


async def _screen(step: Step, review: Review) -> None:
    """Which paragraphs are somewhat like a known injection."""
    texts, client = review.texts, review.desk.client
    vectors = await review.ask(step, lambda: client.encode(texts, step.model), texts)
    likeness = (vectors @ review.library.injections.T).max(axis=1)
    review.screened = [
        text for text, like in zip(texts, likeness, strict=True) if like >= _SCREENED
    ]


async def _guard(step: Step, review: Review) -> None:
    """By itself the guard takes one clause in eight for an injection: it sees what was screened."""
    texts, client = review.screened, review.desk.client
    if not texts:
        return
    verdicts = await review.ask(step, lambda: client.classify(texts, step.model), texts)
    review.found.suspicious = [
        text for text, one in zip(texts, verdicts, strict=True) if one.label == "injection"
    ]


async def _summary(step: Step, review: Review) -> None:
    """A generator puts the notes into words; at this size it must not be asked for more."""
    prompt, client = f"{_TO_REWRITE}{findings.notes(review.found)}", review.desk.client
    said = await review.ask(
        step,
        lambda: client.chat(prompt, step.model, max_tokens=_SUMMARY_TOKENS, temperature=0),
        [prompt],
    )
    review.found.summary = said.text.strip()


STEPS = (
    Step("file type", FILE_TYPE, (), _file_type),
    Step("image guard", IMAGE_GUARD, ("file type",), _image_guard),
    Step("ocr", OCR, ("file type",), _ocr),
    Step("layout", LAYOUT, ("file type",), _layout),
    Step("paragraphs", "", ("ocr", "layout"), _paragraphs),
    Step("personal data", PERSONAL_DATA, ("paragraphs",), _personal_data),
    Step("parties", ENTITIES, ("paragraphs",), _entities),
    Step("embed", EMBEDDER, ("paragraphs",), _embed),
    Step("weigh terms", TERMS, ("paragraphs",), _weigh),
    Step("screen", SCREEN, ("paragraphs",), _screen),
    Step("guard", GUARD, ("screen",), _guard),
    Step("rerank", RERANKER, ("embed", "weigh terms"), _rerank),
    Step("summary", GENERATOR, ("parties", "rerank", "guard"), _summary),
)


async def review_all(
    client: AsyncClient, files: Mapping[str, bytes], *, max_in_flight: int = 64
) -> tuple[list[Findings], Desk]:
    """Reviews all files at once. Returns the findings in their order, and the notes of the calls.

    max_in_flight: calls that are with the server at one time; 1 makes one after another. Raises an
    ExceptionGroup of `ShoalError`s where a step fails.
    """
    desk = Desk(client, max_in_flight)
    library = await _library(desk)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_review(Review(name, blob, desk, library, Findings(name))))
            for name, blob in files.items()
        ]
    return [task.result() for task in tasks], desk


async def _review(review: Review) -> Findings:
    done = {step.name: asyncio.Event() for step in STEPS}

    async def take(step: Step) -> None:
        for need in step.needs:
            await done[need].wait()
        await step.run(step, review)
        done[step.name].set()

    async with asyncio.TaskGroup() as group:
        for step in STEPS:
            group.create_task(take(step))
    return review.found


async def _library(desk: Desk) -> Library:
    texts, known, client = [c.text for c in CLAUSES], list(KNOWN_INJECTIONS), desk.client
    name = "library"
    dense, sparse, injections = await asyncio.gather(
        desk.ask(lambda: client.encode(texts, EMBEDDER), (name, "embed", EMBEDDER), texts),
        desk.ask(lambda: client.encode_sparse(texts, TERMS), (name, "weigh terms", TERMS), texts),
        desk.ask(lambda: client.encode(known, SCREEN), (name, "screen", SCREEN), known),
    )
    terms = [dict(zip(one.indices.tolist(), one.values.tolist(), strict=True)) for one in sparse]
    return Library(dense, terms, injections)


def _best(scores: NDArray[np.floating]) -> list[int]:
    return [int(at) for at in np.argsort(-scores, kind="stable")[:_CANDIDATES]]


def _dot(one: SparseVector, other: Mapping[int, float]) -> float:
    weights = zip(one.indices.tolist(), one.values.tolist(), strict=True)
    return float(sum(weight * other.get(at, 0.0) for at, weight in weights))
