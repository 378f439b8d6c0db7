"""A runtime in its own process, as a worker has it: real host, real socket.

Owns starting it (in its bundle where it has one), sending items and comparing answers. Does not
own what is sent (`subjects`) or claimed (the tests).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import psutil

from shoal.bundles.definition import read
from shoal.bundles.shelf import Home, Shelf
from shoal.catalog.resolve import model_spec, tokenizer_path
from shoal.catalog.schema import Entry
from shoal.errors import CallerError, ShoalError
from shoal.ipc.client import RuntimeConnection
from shoal.ipc.messages import Hello, ItemDone, Loaded, ModelSpec, RunItem
from shoal.wire.envelope import Inputs, Result
from shoal.wire.records import Record, unpack
from shoal.worker.supervise import RuntimeProcess
from shoal.worker.tokenise import Tokeniser
from tests.contract.subjects import Subject
from tests.support.bundle_builds import built
from tests.support.prepared import run_item
from tests.support.runtime_models import array, sparse_rows

T = TypeVar("T")
Answer = list[np.ndarray] | list[Record]

_result = msgspec.msgpack.Decoder(Result).decode
_CALL_S = 60.0
_BUILD_S = 110.0
_VOCABULARY = 2**16  # no sparse vector of these models is longer
# Float32 in another order of adding; a wrong padding or mask is orders of magnitude worse.
LEAST_COSINE = 0.9999


class Hosted:
    """One runtime process, on one thread, with the subject's first model loaded."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.subject = subject
        self.folder = folder
        self._loop = asyncio.Runner()
        self._process: RuntimeProcess | None = None
        self._shelf = Shelf(folder / "bundles", read())
        self._tokenisers: dict[str, Tokeniser | None] = {}

    def start(self) -> None:
        """Starts it and loads the model. Raises what the runtime says."""
        bundle = next(
            (b for b in self._shelf.bundles if self.subject.runtime in b.definition.runtimes), None
        )
        if bundle is not None:
            self.wait(built(self._shelf, bundle), _BUILD_S)

        async def home() -> Home | None:
            return None if bundle is None else await self._shelf.home(bundle, lambda _: None)

        self._process = RuntimeProcess(
            self.subject.runtime, device="cpu#0", threads=1, on_lost=lambda: None, home=home
        )
        self.wait(self._process.connection())
        self.load(self.subject.entry)

    def leave(self) -> None:
        """Stops it."""
        if self._process is not None:
            self.wait(self._process.stop())
        self._loop.close()

    def wait(self, call: Awaitable[T], most_s: float = _CALL_S) -> T:
        """What a call gives, in the loop of this process."""

        async def bounded() -> T:
            return await asyncio.wait_for(call, most_s)

        return self._loop.run(bounded())

    @property
    def connection(self) -> RuntimeConnection:
        """The socket to it."""
        assert self._process is not None
        return self._process.live()

    @property
    def hello(self) -> Hello:
        """Who it says it is."""
        assert self._process is not None
        assert self._process.hello is not None
        return self._process.hello

    def held_bytes(self) -> int:
        """Resident memory of the process."""
        return self.wait(self.connection.memory()).process_bytes

    def thread_cpu_s(self) -> dict[int, float]:
        """Processor time that each thread of the process has used, by its id."""
        threads = psutil.Process(self.hello.pid).threads()
        return {one.id: one.user_time + one.system_time for one in threads}

    def spec(self, entry: Entry) -> ModelSpec:
        """What the runtime is told of an entry."""
        return model_spec(entry, self.folder)

    def load(self, entry: Entry) -> Loaded:
        """Loads an entry's model."""
        return self.wait(self.connection.load(self.spec(entry)))

    def unload(self, entry: Entry, *, keep: bool = False) -> None:
        """Unloads it."""
        self.wait(self.connection.unload(entry.key, keep=keep))

    def item(self, inputs: Inputs, entry: Entry | None = None, **params: Any) -> RunItem:
        """The item that a worker would make. Raises `CallerError` where a worker refuses it."""
        entry = entry or self.subject.entry
        if entry.source not in self._tokenisers:
            reads = self.hello.traits.accepts_ids and "text" in entry.inputs
            self._tokenisers[entry.source] = (
                Tokeniser(
                    tokenizer_path(entry, self.folder),
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
