"""A loaded encoder model at work: items in, an outcome for each out.

Whatever a runtime computes with, the steps are the same: cut items into sequences, run each
distinct sequence once, pool, and make every item's answer of its own rows alone. Owns these steps
and the rule that an item's fault (too long, an unknown token, numbers that are not finite) is that
item's alone. Does not own the network (`onnx`, `torch`), pooling or heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shoal.core.batching import partition
from shoal.errors import InvalidRequest, ModelUnavailable, RunFailed, ShoalError
from shoal.ipc.messages import ModelSpec, RunItem
from shoal.runtimes.heads import Head, load_head, margin, sigmoid, softmax
from shoal.runtimes.interface import RanItems
from shoal.runtimes.pooling import Hidden, Pooling, pieces
from shoal.runtimes.sequences import Limits, TokenSequence, cut, place
from shoal.wire.arrays import Array
from shoal.wire.envelope import Result

Floats = npt.NDArray[np.float32]
SparseRow = tuple[npt.NDArray[np.uint32], Floats]

# The vocabulary head makes a block [tokens, vocab]; 256 tokens of BERT's 30,522 words are 31 MB.
VOCABULARY_TOKENS = 256
_TINY = np.float32(1e-12)


class Network(Protocol):
    """What computes: one per loaded model. Arrays are numpy, float32.

    packs: it runs sequences end to end, so that a group needs no equal lengths. classifier: the
    network's own classification head over its `cls` vector, if it has one.
    """

    limits: Limits
    packs: bool
    has_vocabulary: bool
    classifier: Head | None
    memory_bytes: int

    def hidden(self, group: Sequence[TokenSequence]) -> Hidden:
        """Hidden states of a group of sequences, in one forward pass."""

    def vocabulary(self, states: Floats) -> Floats:
        """SPLADE weights [n, vocab] of hidden states [n, tokens, d] that hold no padding."""


@dataclass(frozen=True, slots=True)
class Need:
    """What is wanted of a sequence; sequences with equal needs run together."""

    pooling: Pooling
    sparse: bool = False


@dataclass(slots=True)
class Rows:
    """The distinct sequences of one need, and what became of them.

    finite says which rows hold nothing but finite numbers.
    """

    index: dict[TokenSequence, int] = field(default_factory=dict)
    vectors: Floats = field(default_factory=lambda: np.empty((0, 0), np.float32))
    sparse: list[SparseRow] = field(default_factory=list)
    finite: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))

    def add(self, sequence: TokenSequence) -> int:
        """The row of a sequence, a new one only where no equal sequence is there."""
        return self.index.setdefault(sequence, len(self.index))


@dataclass(frozen=True, slots=True)
class Plan:
    """Where an item finds its numbers: its rows among those of `need`."""

    need: Need
    rows: list[int]


class LoadedModel:
    """One model, ready to run batches. Raises `ModelUnavailable` for what it could not serve."""

    def __init__(self, spec: ModelSpec, network: Network) -> None:
        self.spec = spec
        self._network = network
        path = Path(spec.path)
        folder = path if path.is_dir() else path.parent
        self._heads = {
            task: load_head(head, folder, f"{spec.key}: head {task}")
            for task, head in spec.heads.items()
        }
        self._check(self._try_out())

    def _try_out(self) -> int:
        """Runs one token, so that a network that cannot run fails here; its vectors' length.

        It also reads the weights in, which would else be part of the first request's time and
        missing from the memory that is measured at the load.
        """
        try:
            hidden = self._network.hidden([TokenSequence(b"\0\0", 2)])
            if "sparse" in self.spec.outputs and self._network.has_vocabulary:
                self._network.vocabulary(hidden.rows(0)[None])
        except RunFailed as error:
            raise ModelUnavailable(f"{self.spec.key} does not run: {error.message}") from error
        return int(hidden.states.shape[-1])

    @property
    def memory_bytes(self) -> int:
        """Bytes of the weights, heads included."""
        return self._network.memory_bytes + sum(head.nbytes for head in self._heads.values())

    def _check(self, dim: int) -> None:
        key = self.spec.key
        for task, head in self._heads.items():
            head.check(dim, f"{key}: head {task}")
        if "score" in self._heads and self._heads["score"].positive is None:
            raise ModelUnavailable(f"{key}: the score head does not say which label is positive")
        if "classify" in self.spec.tasks and not (
            "classify" in self._heads or self._network.classifier
        ):
            raise ModelUnavailable(f"{key}: it has neither a classifier nor a head for classify")
        if "sparse" in self.spec.outputs and not self._network.has_vocabulary:
            raise ModelUnavailable(f"{key}: sparse vectors need a masked-language head")

    def run(self, items: Sequence[RunItem], block_tokens: int | None = None) -> RanItems:
        """An outcome for each item, in order. Raises what the network raises as a whole."""
        budget_tokens = self.spec.batch_tokens if block_tokens is None else block_tokens
        work: dict[Need, Rows] = {}
        plans: list[Plan | ShoalError] = []
        for item in items:
            try:
                plans.append(self._plan(item, work))
            except ShoalError as error:
                plans.append(error)
        padded_tokens = sum(self._forward(need, rows, budget_tokens) for need, rows in work.items())
        outcomes: list[Result | ShoalError] = []
        for item, plan in zip(items, plans, strict=True):
            if isinstance(plan, ShoalError):
                outcomes.append(plan)
                continue
            try:
                outcomes.append(self._answer(item, plan, work[plan.need]))
            except ShoalError as error:
                outcomes.append(error)
        return RanItems(outcomes, padded_tokens)

    def _plan(self, item: RunItem, work: dict[Need, Rows]) -> Plan:
        sequences = cut(item, self._network.limits)
        if not sequences:
            raise InvalidRequest(f"item {item.item} has no inputs", param="input")
        need = self._need(item)
        rows = work.setdefault(need, Rows())
        return Plan(need, [rows.add(sequence) for sequence in sequences])

    def _need(self, item: RunItem) -> Need:
        """What an item wants of its sequences. Raises `InvalidRequest` for what is not served."""
        if item.task not in self.spec.tasks:
            raise InvalidRequest(f"{self.spec.key} does not {item.task}", param="model")
        if item.task == "encode":
            wanted = self._outputs(item)
            return Need(self.spec.pooling, sparse="sparse" in wanted)
        joint = item.task not in self._heads and item.layout == "single"
        if not joint:
            if item.task == "classify" and item.task not in self._heads:
                raise InvalidRequest(f"{self.spec.key} classifies no pairs of separate texts")
            return Need(self.spec.pooling)
        if self._network.classifier is None:
            raise InvalidRequest(f"{self.spec.key} cannot {item.task} texts that are read as one")
        return Need("none" if self.spec.pooling == "none" else "cls")

    def _outputs(self, item: RunItem) -> list[str]:
        wanted = item.params.outputs or self.spec.outputs[:1]
        if not wanted:
            raise InvalidRequest(f"{self.spec.key} encodes nothing", param="model")
        for output in wanted:
            if output not in self.spec.outputs:
                raise InvalidRequest(
                    f"{self.spec.key} has no output {output!r}, only "
                    f"{', '.join(self.spec.outputs)}",
                    param="outputs",
                )
        return wanted

    def _forward(self, need: Need, rows: Rows, budget_tokens: int) -> int:
        """Fills in the rows' numbers; returns the tokens that were computed, padding included."""
        sequences = list(rows.index)
        lengths = [len(sequence) for sequence in sequences]
        n = len(sequences)
        rows.finite = np.ones(n, np.bool_)
        rows.sparse = [(np.empty(0, np.uint32), np.empty(0, np.float32))] * n
        padded_tokens = 0
        for group in self._groups(lengths, budget_tokens):
            hidden = self._network.hidden([sequences[i] for i in group])
            pooled = hidden.pool(need.pooling)
            if rows.vectors.shape != (n, pooled.shape[1]):
                rows.vectors = np.empty((n, pooled.shape[1]), np.float32)
            rows.vectors[group] = pooled
            # An infinity or NaN at any token reaches the sum over tokens.
            summary = hidden.pool("mean") if need.sparse else pooled
            rows.finite[group] = np.isfinite(summary).all(axis=1)
            if need.sparse:
                self._expand(hidden, group, rows)
            used = sum(lengths[i] for i in group)
            padded_tokens += used if self._network.packs else lengths[group[-1]] * len(group)
        return padded_tokens

    def _groups(self, lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
        """Which sequences run in one pass; where padding matters, the longest comes last."""
        if budget_tokens == 0:
            return [sorted(range(len(lengths)), key=lengths.__getitem__)]
        if not self._network.packs:
            return partition(lengths, budget_tokens)
        groups: list[list[int]] = []
        room_tokens = 0
        for i, length in enumerate(lengths):
            if not groups or length > room_tokens:
                groups.append([])
                room_tokens = budget_tokens
            groups[-1].append(i)
            room_tokens -= length
        # Sequences of one length side by side can share an attention call.
        return [sorted(group, key=lengths.__getitem__) for group in groups]

    def _expand(self, hidden: Hidden, group: Sequence[int], rows: Rows) -> None:
        """Fills in the sparse vectors of one group."""
        for chosen, states in pieces(hidden, VOCABULARY_TOKENS):
            weights = self._network.vocabulary(states)
            for at, row in zip(chosen, weights, strict=True):
                indices = np.flatnonzero(row)
                values = row[indices]
                rows.sparse[group[at]] = (indices.astype(np.uint32), values)
                rows.finite[group[at]] &= bool(np.isfinite(values).all())

    def _answer(self, item: RunItem, plan: Plan, rows: Rows) -> Result:
        bad = np.flatnonzero(~rows.finite[plan.rows])
        if len(bad):
            raise RunFailed(
                f"{self.spec.key}: {place(item, int(bad[0]))} gave numbers that are not finite"
            )
        vectors = rows.vectors[plan.rows]
        if item.task == "encode":
            return self._encoded(item, vectors, [rows.sparse[i] for i in plan.rows])
        if item.task == "score":
            return self._scored(item, vectors)
        return self._classified(item, vectors)

    def _encoded(self, item: RunItem, vectors: Floats, sparse: list[SparseRow]) -> Result:
        arrays: dict[str, Array] = {}
        wanted = self._outputs(item)
        if "dense" in wanted:
            dimensions = item.params.dimensions
            if dimensions is not None:
                if not 1 <= dimensions <= vectors.shape[1]:
                    raise InvalidRequest(
                        f"{self.spec.key} gives 1 to {vectors.shape[1]} dimensions",
                        param="dimensions",
                    )
                vectors = vectors[:, :dimensions]
            chosen = item.params.normalize
            if self.spec.normalize if chosen is None else chosen:
                vectors = normalized(vectors)
            arrays["dense"] = Array.of(np.ascontiguousarray(vectors))
        if "sparse" in wanted:
            counts = np.array([len(indices) for indices, _ in sparse], np.uint32)
            arrays["sparse_counts"] = Array.of(counts)
            arrays["sparse_indices"] = Array.of(np.concatenate([ids for ids, _ in sparse]))
            arrays["sparse_values"] = Array.of(np.concatenate([values for _, values in sparse]))
        return Result(arrays)

    def _scored(self, item: RunItem, vectors: Floats) -> Result:
        head = self._heads.get("score")
        if item.layout == "single":
            head = self._network.classifier
            logits = self._positive(item, head, vectors, None)
        elif head is None:
            unit = normalized(vectors)
            first, second = _pairs(item, unit)
            cosines: Floats = np.einsum("nd,nd->n", first, second)
            return Result({"scores": Array.of(cosines), "logits": Array.of(cosines)})
        else:
            logits = self._positive(item, head, *_pairs(item, vectors))
        return Result({"scores": Array.of(sigmoid(logits)), "logits": Array.of(logits)})

    def _positive(
        self, item: RunItem, head: Head | None, first: Floats, second: Floats | None
    ) -> Floats:
        """What the score orders by, float32 [n]."""
        if head is None:
            raise InvalidRequest(f"{self.spec.key} cannot {item.task}")
        logits = head.logits(first, second if head.pair else None)
        if head.independent or logits.shape[1] == 1:
            return logits[:, head.positive or 0]
        if head.positive is None:
            raise InvalidRequest(
                f"{self.spec.key} has {logits.shape[1]} classes and none is named as positive"
            )
        return margin(logits, head.positive)

    def _classified(self, item: RunItem, vectors: Floats) -> Result:
        head = self._heads.get("classify") or self._network.classifier
        if head is None or head.pair != (item.layout != "single"):
            raise InvalidRequest(
                f"{self.spec.key} classifies {'pairs' if head and head.pair else 'single texts'}"
            )
        first, second = _pairs(item, vectors) if head.pair else (vectors, None)
        logits = head.logits(first, second)
        one_by_one = head.independent or logits.shape[1] == 1
        scores = sigmoid(logits) if one_by_one else softmax(logits)
        labels = head.labels or tuple(f"LABEL_{i}" for i in range(logits.shape[1]))
        return Result({"scores": Array.of(scores), "logits": Array.of(logits)}, list(labels))


def _pairs(item: RunItem, vectors: Floats) -> tuple[Floats, Floats]:
    """First and second vector of each pair, [n, d] each, as the item's layout has them."""
    if item.layout == "shared":
        if len(vectors) < 2:
            raise InvalidRequest(
                f"item {item.item} has a query and no documents", param="documents"
            )
        return np.broadcast_to(vectors[:1], vectors[1:].shape), vectors[1:]
    if item.layout != "pairs" or len(vectors) % 2:
        raise InvalidRequest(f"item {item.item} holds no pairs")
    return vectors[::2], vectors[1::2]


def normalized(vectors: Floats) -> Floats:
    """Vectors [n, d] scaled to length 1; a zero vector stays one."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: Floats = vectors / np.maximum(lengths, _TINY)
    return unit
