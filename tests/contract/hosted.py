"""Batches of a runtime in its own process.

Owns making the items that a worker would make, sending them and comparing answers. Does not own
the process (`process`), what is sent (`subjects`) or claimed (the tests).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shoal.catalog.resolve import tokenizer_path
from shoal.catalog.schema import Entry
from shoal.errors import CallerError, ShoalError
from shoal.ipc.messages import ItemDone, RunItem
from shoal.wire.envelope import Inputs, Result
from shoal.wire.records import Record, unpack
from shoal.worker.tokenise import Tokeniser
from tests.contract.process import Process
from tests.contract.subjects import Subject
from tests.support.cache import cache_dir
from tests.support.prepared import run_item
from tests.support.runtime_models import array, sparse_rows

Answer = list[np.ndarray] | list[Record]

_result = msgspec.msgpack.Decoder(Result).decode
_VOCABULARY = 2**16  # no sparse vector of these models is longer
# Float32 in another order of adding; a wrong padding or mask is orders of magnitude worse.
LEAST_COSINE = 0.9999


class Hosted(Process):
    """A process with the subject's first model loaded."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        super().__init__(subject.runtime, folder)
        self.subject = subject
        self._tokenisers: dict[str, Tokeniser | None] = {}

    def start(self) -> None:
        """Starts it and loads the model. Raises what the runtime says."""
        super().start()
        self.load(self.subject.entry)

    def item(self, inputs: Inputs, entry: Entry | None = None, **params: Any) -> RunItem:
        """The item that a worker would make. Raises `CallerError` where a worker refuses it."""
        entry = entry or self.subject.entry
        if entry.source not in self._tokenisers:
            reads = self.hello.traits.accepts_ids and "text" in entry.inputs
            self._tokenisers[entry.source] = (
                Tokeniser(
                    tokenizer_path(entry, cache_dir()),
                    entry.max_tokens,
                    bare=entry.family == "static",
                )
                if reads
                else None
            )
        tokeniser = self._tokenisers[entry.source]
        return run_item(entry, self.hello.traits, tokeniser, entry.tasks[0], inputs, **params)

    def run(
        self, items: Sequence[RunItem], entry: Entry | None = None
    ) -> list[Result | ShoalError]:
        """The outcomes of a batch, in order."""
        named = [msgspec.structs.replace(item, item=str(at)) for at, item in enumerate(items)]
        key = (entry or self.subject.entry).key
        done = self.wait(self.connection.run(key, named)).items
        assert [one.item for one in done] == [one.item for one in named]
        return [_outcome(one) for one in done]

    def outcome(
        self, inputs: Inputs, entry: Entry | None = None, **params: Any
    ) -> Result | ShoalError:
        """What becomes of one item, wherever on its way it is refused."""
        try:
            item = self.item(inputs, entry, **params)
        except CallerError as error:
            return error
        return self.run([item], entry)[0]

    def answers(self, *batch: Inputs, entry: Entry | None = None, **params: Any) -> list[Answer]:
        """The answers to a batch with an item for each `Inputs`; an error is raised."""
        items = [self.item(inputs, entry, **params) for inputs in batch]
        return [answer(outcome) for outcome in self.run(items, entry)]

    @cached_property
    def alone(self) -> list[Answer]:
        """The answer to each of the subject's inputs, each run by itself."""
        return [self.answers(inputs)[0] for inputs in self.subject.inputs]


def _outcome(done: ItemDone) -> Result | ShoalError:
    return done.failure.error() if done.failure is not None else _result(done.result)


def answer(outcome: Result | ShoalError) -> Answer:
    """What an item was answered, one element for each input; an error is raised."""
    if isinstance(outcome, ShoalError):
        raise outcome
    if outcome.records:
        return [unpack(record) for record in outcome.records]
    arrays = {name: array(outcome, name) for name in outcome.arrays}
    if "sparse_counts" in arrays:
        return list(sparse_rows(outcome, _VOCABULARY))
    if "multivector_counts" in arrays:
        return np.split(arrays["multivector"], np.cumsum(arrays["multivector_counts"])[:-1])
    return list(arrays["dense" if "dense" in arrays else "scores"])


def same(one: Answer, other: Answer) -> bool:
    """Whether two answers are: numbers by the cosine of each input's, everything else exactly."""
    if len(one) != len(other):
        return False
    return all(
        cosine(a, b) >= LEAST_COSINE if isinstance(a, np.ndarray) else a == b
        for a, b in zip(one, other, strict=True)
    )


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """The cosine of two arrays of the same shape, taken as vectors; -1 where shapes differ."""
    if one.shape != other.shape:
        return -1.0
    a, b = one.ravel().astype(np.float64), other.ravel().astype(np.float64)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
