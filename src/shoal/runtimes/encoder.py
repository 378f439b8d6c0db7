"""A loaded encoder model at work: items in, an outcome for each out.

Whatever a runtime computes with, the steps are the same: cut items into sequences, run each
distinct sequence once, pool, and make every item's answer of its own rows alone. Owns these steps
and the rule that an item's fault (too long, an unknown token, numbers that are not finite) is that
item's alone. Does not own the network (`onnx`, `torch`), pooling, heads, or what is made of an
item's numbers (`answers`).

Options of a model, in every runtime that has encoders:

    positive        label whose probability is the score, for cross-encoders with several classes
    multi_label     true: the network's own classes do not exclude each other (sigmoids)
    special_tokens  false: token vectors are without those of [CLS], [SEP] and their like
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shoal.core.batching import partition
from shoal.errors import InvalidRequest, ModelUnavailable, RunFailed, ShoalError
from shoal.ipc.messages import ModelSpec, RunItem
from shoal.runtimes.answers import Answers, Numbers, SparseRow
from shoal.runtimes.bert import config_beside, labels_of
from shoal.runtimes.entities import Tags
from shoal.runtimes.heads import Head, called, load_head
from shoal.runtimes.inputs import not_finite
from shoal.runtimes.interface import RanItems
from shoal.runtimes.pooling import Hidden, Pooling, pieces
from shoal.runtimes.sequences import Limits, TokenSequence, cut
from shoal.wire.envelope import Result

Floats = npt.NDArray[np.float32]

# The vocabulary head makes a block [tokens, vocab]; 256 tokens of BERT's 30,522 words are 31 MB.
VOCABULARY_TOKENS = 256


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

    def token_logits(self, group: Sequence[TokenSequence]) -> list[Floats]:
        """Class logits [tokens, k] of each sequence. Raises `RunFailed` if it classifies no tokens.

        The names of the classes are those of `config.json`, or the entry's.
        """


@dataclass(frozen=True, slots=True)
class Need:
    """What is wanted of a sequence; sequences with equal needs run together.

    tokens: its hidden states too. tags: the logits of its tokens, and nothing else.
    """

    pooling: Pooling
    sparse: bool = False
    tokens: bool = False
    tags: bool = False


@dataclass(slots=True)
class Rows:
    """The distinct sequences of one need, and what became of them.

    tokens: hidden states [tokens, d], or logits [tokens, classes]. finite says which rows hold
    nothing but finite numbers.
    """

    index: dict[TokenSequence, int] = field(default_factory=dict)
    vectors: Floats = field(default_factory=lambda: np.empty((0, 0), np.float32))
    sparse: list[SparseRow] = field(default_factory=list)
    tokens: list[Floats] = field(default_factory=list)
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
    """One model, ready to run batches. Raises `ModelUnavailable` for what it could not serve.

    adapters: keys of those that the network has; who gives it one, or takes it away, says so here.
    """

    def __init__(self, spec: ModelSpec, network: Network) -> None:
        self.spec = spec
        self.adapters: set[str] = set()
        self._network = network
        path = Path(spec.path)
        self._folder = path if path.is_dir() else path.parent
        self._heads = {
            task: load_head(head, self._folder, f"{spec.key}: head {task}")
            for task, head in spec.heads.items()
        }
        own = network.classifier
        if own is not None:
            several = own.independent or spec.options.get("multi_label") is True
            own = replace(own, independent=several)
        self._classifier = own
        dim, tags = self._try_out()
        self._check(dim)
        self._answers = Answers(spec, self._heads, own, tags)

    def _try_out(self) -> tuple[int, Tags]:
        """Runs one token, so that a network that cannot run fails here.

        It also reads the weights in, which would else be part of the first request's time and
        missing from the memory that is measured at the load. Returns the length of the network's
        vectors, and the classes of its tokens.
        """
        one = [TokenSequence(b"\0\0", 2)]
        tags: tuple[str, ...] = ()
        try:
            hidden = self._network.hidden(one)
            if "sparse" in self.spec.outputs and self._network.has_vocabulary:
                self._network.vocabulary(hidden.rows(0)[None])
            if "extract" in self.spec.tasks:
                classes = self._network.token_logits(one)[0].shape[-1]
                tags = called(
                    labels_of(config_beside(self._folder), classes), self.spec.labels, self.spec.key
                )
        except RunFailed as error:
            raise ModelUnavailable(f"{self.spec.key} does not run: {error.message}") from error
        return int(hidden.states.shape[-1]), Tags.read(tags)

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
        if "classify" in self.spec.tasks and not ("classify" in self._heads or self._classifier):
            raise ModelUnavailable(f"{key}: it has neither a classifier nor a head for classify")
        if "sparse" in self.spec.outputs and not self._network.has_vocabulary:
            raise ModelUnavailable(f"{key}: sparse vectors need a masked-language head")
        by_token = "multivector" in self.spec.outputs or self.spec.scorer == "maxsim"
        if by_token and self.spec.pooling == "none":
            raise ModelUnavailable(f"{key}: a graph that pools gives no token vectors")

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
        if item.adapter and item.adapter not in self.adapters:
            raise ModelUnavailable(f"{item.adapter} is not loaded")
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
        if item.task == "extract":
            self._answers.outputs(item)
            return Need("none", tags=True)
        if item.task == "encode":
            wanted = self._answers.outputs(item)
            return Need(self.spec.pooling, "sparse" in wanted, "multivector" in wanted)
        joint = item.task not in self._heads and item.layout == "single"
        if not joint:
            if item.task == "classify" and item.task not in self._heads:
                raise InvalidRequest(f"{self.spec.key} classifies no pairs of separate texts")
            return Need(self.spec.pooling, tokens=self._answers.by_token(item))
        if self._classifier is None:
            raise InvalidRequest(f"{self.spec.key} cannot {item.task} texts that are read as one")
        return Need("none" if self.spec.pooling == "none" else self._classifier.pooling)

    def _forward(self, need: Need, rows: Rows, budget_tokens: int) -> int:
        """Fills in the rows' numbers; returns the tokens that were computed, padding included."""
        sequences = list(rows.index)
        least = self._network.limits.least
        lengths = [max(least, len(sequence)) for sequence in sequences]
        n = len(sequences)
        rows.finite = np.ones(n, np.bool_)
        rows.sparse = [(np.empty(0, np.uint32), np.empty(0, np.float32))] * n
        padded_tokens = 0
        rows.tokens = [np.empty((0, 0), np.float32)] * n
        for group in self._groups(lengths, budget_tokens):
            longest = lengths[group[-1]]
            if self.adapters:
                # Side by side, the tokens of one adapter are one stretch of rows.
                group.sort(key=lambda i: sequences[i].adapter)
            chosen = [sequences[i] for i in group]
            if need.tags:
                for at, logits in zip(group, self._network.token_logits(chosen), strict=True):
                    rows.tokens[at] = logits
                    rows.finite[at] = bool(np.isfinite(logits).all())
            else:
                self._pool(need, self._network.hidden(chosen), group, rows)
            used = sum(lengths[i] for i in group)
            padded_tokens += used if self._network.packs else longest * len(group)
        return padded_tokens

    def _pool(self, need: Need, hidden: Hidden, group: list[int], rows: Rows) -> None:
        """Fills in the numbers of one group."""
        pooled = hidden.pool(need.pooling)
        if rows.vectors.shape != (len(rows.index), pooled.shape[1]):
            rows.vectors = np.empty((len(rows.index), pooled.shape[1]), np.float32)
        rows.vectors[group] = pooled
        # An infinity or NaN at any token reaches the sum over tokens.
        summary = hidden.pool("mean") if need.sparse or need.tokens else pooled
        rows.finite[group] = np.isfinite(summary).all(axis=1)
        if need.sparse:
            self._expand(hidden, group, rows)
        if need.tokens:
            for index, at in enumerate(group):
                # A copy: a view would keep the whole group's states, padding included.
                rows.tokens[at] = np.array(hidden.rows(index))

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
            raise not_finite(item, int(bad[0]), self.spec.key)
        vectors = rows.vectors[plan.rows] if len(rows.vectors) else rows.vectors
        sparse = [rows.sparse[i] for i in plan.rows]
        return self._answers.answer(
            item, Numbers(vectors, sparse, [rows.tokens[i] for i in plan.rows])
        )
