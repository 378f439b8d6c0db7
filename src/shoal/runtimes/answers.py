"""From the numbers of an item's sequences to its result, task by task.

Owns what each task's `Result` holds and the refusal of what a model does not give. Does not own
running anything (`encoder`), the arithmetic on vectors (`vectors`), heads, or entities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shoal.errors import InvalidRequest, ShoalError
from shoal.ipc.messages import ModelSpec, RunItem
from shoal.runtimes.entities import Tags, Window, find
from shoal.runtimes.heads import Head, among, margin, sigmoid, softmax
from shoal.runtimes.inputs import not_finite
from shoal.runtimes.sequences import places
from shoal.runtimes.vectors import as_dtype, leading, maxsim, normalized
from shoal.wire.arrays import Array
from shoal.wire.envelope import Result
from shoal.wire.records import Record, pack

Floats = npt.NDArray[np.float32]
SparseRow = tuple[npt.NDArray[np.uint32], Floats]


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a network gave for the sequences of an item, in order; what was not needed is empty.

    vectors: pooled [n, d]. tokens: hidden states [tokens, d] of each, or logits [tokens, classes].
    """

    vectors: Floats
    sparse: list[SparseRow] = field(default_factory=list)
    tokens: list[Floats] = field(default_factory=list)


class Answers:
    """Makes the results of one model."""

    def __init__(
        self, spec: ModelSpec, heads: Mapping[str, Head], classifier: Head | None, tags: Tags
    ) -> None:
        self._spec = spec
        self._heads = heads
        self._classifier = classifier
        self._tags = tags

    def outputs(self, item: RunItem) -> list[str]:
        """What an item of encode or extract wants. Raises `InvalidRequest`."""
        given = self._spec.outputs if item.task == "encode" else ["entities"]
        wanted = item.params.outputs or given[:1]
        if not wanted:
            raise InvalidRequest(f"{self._spec.key} encodes nothing", param="model")
        for output in wanted:
            if output not in given:
                raise InvalidRequest(
                    f"{self._spec.key} has no output {output!r}, only {', '.join(given)}",
                    param="outputs",
                )
        return wanted

    def by_token(self, item: RunItem) -> bool:
        """Whether an item is scored by its token vectors."""
        return item.task == "score" and item.layout == "shared" and self._spec.scorer == "maxsim"

    def answer(self, item: RunItem, numbers: Numbers) -> Result:
        """An item's result. Raises `InvalidRequest`."""
        if item.task == "encode":
            return self._encoded(item, numbers)
        if item.task == "extract":
            return self._extracted(item, numbers.tokens)
        if item.task == "score":
            return self._scored(item, numbers)
        return self._classified(item, numbers.vectors)

    def of_vectors(self, item: RunItem, vectors: Floats) -> Result | ShoalError:
        """As `answer`, from pooled vectors [n, d] alone; what is wrong is the item's outcome."""
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            return not_finite(item, int(bad[0]), self._spec.key)
        try:
            return self.answer(item, Numbers(vectors))
        except ShoalError as error:
            return error

    def _encoded(self, item: RunItem, numbers: Numbers) -> Result:
        arrays: dict[str, Array] = {}
        wanted, params = self.outputs(item), item.params
        unit = self._spec.normalize if params.normalize is None else params.normalize
        if "dense" in wanted:
            vectors = leading(numbers.vectors, params.dimensions, self._spec.key)
            vectors = normalized(vectors) if unit else vectors
            arrays["dense"] = Array.of(as_dtype(vectors, params.dtype))
        if "multivector" in wanted:
            kept = self._kept(item, numbers.tokens)
            flat = np.concatenate(kept)
            flat = normalized(flat) if unit else flat
            arrays["multivector_counts"] = Array.of(np.array([len(one) for one in kept], np.uint32))
            arrays["multivector"] = Array.of(as_dtype(flat, params.dtype))
        if "sparse" in wanted:
            indices, values = zip(*numbers.sparse, strict=True)
            arrays["sparse_counts"] = Array.of(np.array([len(ids) for ids in indices], np.uint32))
            arrays["sparse_indices"] = Array.of(np.concatenate(indices))
            arrays["sparse_values"] = Array.of(np.concatenate(values))
        return Result(arrays)

    def _kept(self, item: RunItem, tokens: list[Floats]) -> list[Floats]:
        """The token vectors of each sequence, without special tokens where the option says so.

        A sequence of nothing else keeps them: each has a vector.
        """
        if self._spec.options.get("special_tokens") is not False or not item.offsets:
            return tokens
        marks = [at[:, 1] > 0 for at in places(item)]
        return [
            states[mark] if mark.any() else states
            for states, mark in zip(tokens, marks, strict=True)
        ]

    def _extracted(self, item: RunItem, logits: list[Floats]) -> Result:
        """The entities of each input, joined over its windows."""
        owners = item.owners or range(len(logits))
        windows: dict[int, list[Window]] = {}
        for owner, at, scores in zip(owners, places(item), logits, strict=True):
            windows.setdefault(owner, []).append((at, scores))
        params = item.params
        found = [
            find(own, self._tags, labels=params.labels, threshold=params.threshold)
            for own in windows.values()
        ]
        return Result(records=[pack(Record(entities=entities)) for entities in found])

    def _scored(self, item: RunItem, numbers: Numbers) -> Result:
        head = self._heads.get("score")
        if item.layout == "single":
            logits = self._positive(item, self._classifier, numbers.vectors, None)
        elif self.by_token(item):
            query, *documents = [normalized(one) for one in self._kept(item, numbers.tokens)]
            _need_documents(item, len(documents))
            sums = np.array([maxsim(query, one) for one in documents], np.float32)
            # The sum is what the field calls MaxSim; the mean is at most 1 whatever the query.
            means = sums / np.float32(len(query))
            return Result({"scores": Array.of(means), "logits": Array.of(sums)})
        elif head is None:
            first, second = _pairs(item, normalized(numbers.vectors))
            cosines: Floats = np.einsum("nd,nd->n", first, second)
            return Result({"scores": Array.of(cosines), "logits": Array.of(cosines)})
        else:
            logits = self._positive(item, head, *_pairs(item, numbers.vectors))
        return Result({"scores": Array.of(sigmoid(logits)), "logits": Array.of(logits)})

    def _positive(
        self, item: RunItem, head: Head | None, first: Floats, second: Floats | None
    ) -> Floats:
        """What the score orders by, float32 [n]."""
        if head is None:
            raise InvalidRequest(f"{self._spec.key} cannot {item.task}")
        logits = head.logits(first, second if head.pair else None)
        if head.independent or logits.shape[1] == 1:
            return logits[:, head.positive or 0]
        if head.positive is None:
            raise InvalidRequest(
                f"{self._spec.key} has {logits.shape[1]} classes and none is named as positive"
            )
        return margin(logits, head.positive)

    def _classified(self, item: RunItem, vectors: Floats) -> Result:
        head = self._heads.get("classify") or self._classifier
        if head is None or head.pair != (item.layout != "single"):
            raise InvalidRequest(
                f"{self._spec.key} classifies {'pairs' if head and head.pair else 'single texts'}"
            )
        first, second = _pairs(item, vectors) if head.pair else (vectors, None)
        logits = head.logits(first, second)
        one_by_one = head.independent or logits.shape[1] == 1
        scores = sigmoid(logits) if one_by_one else softmax(logits)
        labels = head.labels or tuple(f"LABEL_{i}" for i in range(logits.shape[1]))
        if item.params.labels:
            chosen = among(item.params.labels, labels)
            scores, logits = scores[:, chosen], logits[:, chosen]
            labels = tuple(labels[i] for i in chosen)
        return Result({"scores": Array.of(scores), "logits": Array.of(logits)}, list(labels))


def _pairs(item: RunItem, vectors: Floats) -> tuple[Floats, Floats]:
    """First and second vector of each pair, [n, d] each, as the item's layout has them."""
    if item.layout == "shared":
        _need_documents(item, len(vectors) - 1)
        return np.broadcast_to(vectors[:1], vectors[1:].shape), vectors[1:]
    if item.layout != "pairs" or len(vectors) % 2:
        raise InvalidRequest(f"item {item.item} holds no pairs")
    return vectors[::2], vectors[1::2]


def _need_documents(item: RunItem, n: int) -> None:
    if n < 1:
        raise InvalidRequest(f"item {item.item} has a query and no documents", param="documents")
