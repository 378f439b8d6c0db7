"""What a bakeoff runs on a model of vectors: batches of uniform and of ragged texts.

Owns the texts' lengths, the measuring, and comparing vectors. Does not own the runtimes' processes
or the table (`bakeoff`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from shoal.catalog.resolve import tokenizer_path
from shoal.catalog.schema import Entry
from shoal.cli.samples import encode_item, sentences
from shoal.clock import monotonic
from shoal.core.batching import partition
from shoal.core.cost import Work
from shoal.errors import Bug
from shoal.ipc.client import RuntimeConnection
from shoal.ipc.messages import Loaded, RunItem, Traits
from shoal.wire.envelope import decode_result
from shoal.worker.costs import CostBook
from shoal.worker.tokenise import Tokeniser

Floats = npt.NDArray[np.float32]

BATCHES = (1, 8, 32)  # texts in a batch; the best of them counts
_FIRST_TEXT = "A shoal is a group of fish that swim together."
_TEXTS = 64
_UNIFORM_TOKENS = 64
_SHORTEST_TOKENS, _MIDDLE_TOKENS, _SPREAD = 8, 40.0, 0.8  # a lognormal mix, as texts of people are
_TOKENS_PER_WORD = 1.5  # of the sample texts, roughly; what counts is counted
_SEED = 1


@dataclass(frozen=True, slots=True)
class EncodeFound:
    """What was measured on one runtime.

    *_tokens_per_s: useful tokens in the best size of batch. cosine: the least, to the vectors of
    the first runtime.
    """

    TITLES: ClassVar[tuple[str, ...]] = ("UNIFORM", "RAGGED", "COSINE")

    uniform_tokens_per_s: float
    ragged_tokens_per_s: float
    cosine: float

    def cells(self) -> tuple[str, ...]:
        """As in the table."""
        return (
            f"{self.uniform_tokens_per_s:,.0f}/s",
            f"{self.ragged_tokens_per_s:,.0f}/s",
            f"{self.cosine:.6f}",
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """The model on the runtime that is measured now."""

    entry: Entry
    traits: Traits
    tokeniser: Tokeniser


class EncodeRun:
    """The same texts for each runtime. seconds: for each size of batch; costs: learns from all.

    Tokens are counted by the model's own tokenizer, whatever the runtime says that it computed.
    """

    def __init__(self, seconds: float, costs: CostBook) -> None:
        self._seconds = seconds
        self._costs = costs
        self._place: _Place | None = None
        self._reference: Floats | None = None

    def make_ready(self, entry: Entry, traits: Traits, cache_dir: Path) -> None:
        """Another runtime is measured from now on."""
        path = tokenizer_path(entry, cache_dir)
        tokeniser = Tokeniser(path, entry.max_tokens, bare=entry.family == "static")
        self._place = _Place(entry, traits, tokeniser)

    @property
    def _here(self) -> _Place:
        if self._place is None:
            raise Bug("no runtime is ready to be measured")
        return self._place

    async def first(self, connection: RuntimeConnection) -> None:
        """The first answer after a load. Raises what it failed with."""
        for done in (await connection.run(self._here.entry.key, [self._item(_FIRST_TEXT)])).items:
            if done.failure is not None:
                raise done.failure.error()

    async def measure(self, connection: RuntimeConnection, loaded: Loaded) -> EncodeFound:
        """What the runtime does."""
        del loaded
        lengths = ragged_lengths(self._here.entry.max_tokens)
        uniform = await self._best_tokens_per_s(connection, [_UNIFORM_TOKENS] * _TEXTS)
        ragged = await self._best_tokens_per_s(connection, lengths)
        vectors = await self._vectors(connection, lengths)
        if self._reference is None:
            self._reference = vectors
        return EncodeFound(uniform, ragged, least_cosine(vectors, self._reference))

    async def _best_tokens_per_s(
        self, connection: RuntimeConnection, lengths: Sequence[int]
    ) -> float:
        """Useful tokens per second with the size of batch that does best."""
        entry, tokeniser = self._here.entry, self._here.tokeniser
        texts = _texts(lengths)
        tokens = [min(len(tokeniser.whole(text).ids), entry.max_tokens) for text in texts]
        items = [self._item(text) for text in texts]
        best = 0.0
        for size in BATCHES:
            batches = [
                (items[i : i + size], tokens[i : i + size]) for i in range(0, len(items), size)
            ]
            await connection.run(entry.key, batches[0][0])  # not timed: buffers are made
            done_tokens, begun_s = 0, monotonic()
            for batch, useful in cycle(batches):
                ran = await connection.run(entry.key, batch, entry.profile.batch_tokens)
                self._costs.model(entry).observe(self._work(useful), ran.run_s)
                done_tokens += sum(useful)
                if monotonic() - begun_s >= self._seconds:
                    break
            best = max(best, done_tokens / (monotonic() - begun_s))
        return best

    def _work(self, lengths: Sequence[int]) -> Work:
        """What a worker would think that a batch of these lengths computes."""
        if self._here.traits.packing:
            return Work.of_packed(lengths)
        groups = partition(lengths, self._here.entry.profile.batch_tokens)
        return Work.of_blocks([[lengths[at] for at in group] for group in groups])

    async def _vectors(self, connection: RuntimeConnection, lengths: Sequence[int]) -> Floats:
        """Vectors [texts, d] of texts of these lengths, in one batch."""
        items = [self._item(text) for text in _texts(lengths)]
        rows = []
        for done in (await connection.run(self._here.entry.key, items)).items:
            if done.failure is not None:
                raise done.failure.error()
            dense = decode_result(done.result).arrays["dense"]
            rows.append(np.frombuffer(dense.data, "<f4"))
        return np.stack(rows)

    def _item(self, text: str) -> RunItem:
        return encode_item(self._here.entry, self._here.traits, self._here.tokeniser, [text])


def _texts(lengths: Sequence[int]) -> list[str]:
    """A text for each length, of about so many tokens: words are a little fewer."""
    words = cycle(" ".join(sentences()).split())
    return [" ".join(islice(words, max(1, round(n / _TOKENS_PER_WORD)))) for n in lengths]


def ragged_lengths(max_tokens: int) -> list[int]:
    """Lengths in tokens as texts of people have them: lognormal, the same ones each time."""
    rng = random.Random(_SEED)  # noqa: S311 - nothing secret
    drawn = (rng.lognormvariate(math.log(_MIDDLE_TOKENS), _SPREAD) for _ in range(_TEXTS))
    return [min(max_tokens, max(_SHORTEST_TOKENS, round(n))) for n in drawn]


def least_cosine(ours: Floats, theirs: Floats) -> float:
    """The least cosine of rows [n, d]; -1 where the vectors are not of one length."""
    if ours.shape != theirs.shape:
        return -1.0
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(((a * b).sum(axis=1) / norms).min())
