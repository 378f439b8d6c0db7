"""The bare runtime: a model in processes of its own, without HTTP, queue or worker.

As many processes of one thread as there are cores, which is how the worker lays out a CPU. Owns
them and the loop that runs batches. What a worker does before a batch (tokenising, cutting into
windows) is done once, outside of what is timed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

from shoal.catalog.resolve import model_spec, tokenizer_path
from shoal.catalog.schema import Entry
from shoal.errors import ShoalError
from shoal.ipc.messages import RunItem
from shoal.runtimes.interface import Runtime
from shoal.runtimes.registry import create
from shoal.wire.envelope import Envelope
from shoal.worker.tokenise import Tokeniser, prepare
from task_cases.cases import Case

LEAVE_S = 10.0
CACHE = Path(tempfile.gettempdir()) / "shoal-bench-cache"


class Bare:
    """A model in bare processes."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._running: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        for _ in range(_cores()):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(self._entry, theirs), daemon=True)
            process.start()
            self._running.append((process, ours))
        for _, pipe in self._running:
            self._told(pipe)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for process, pipe in self._running:
            pipe.close()
            process.join(LEAVE_S)

    def take(self, one: Case) -> None:
        """Makes the items of a case ready; `rate` runs those of the last one."""
        self._ask(one)

    def rate(self, batch: int, seconds: float) -> float:
        """Inputs per second of all processes together, in batches of so many items."""
        return sum(self._ask((batch, seconds)))

    def _ask(self, what: Case | tuple[int, float]) -> list[float]:
        for _, pipe in self._running:
            pipe.send(what)
        return [self._told(pipe) for _, pipe in self._running]

    def _told(self, pipe: Connection) -> float:
        try:
            return float(pipe.recv())
        except EOFError:
            raise SystemExit(f"a bare process of {self._entry.id} ended") from None

    @property
    def processes(self) -> int:
        """How many there are."""
        return len(self._running)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _serve(entry: Entry, pipe: Connection) -> None:
    """In a process of its own: runs what it is told to until the pipe is closed."""
    CACHE.mkdir(exist_ok=True)
    runtime = create(entry.runtime, device="cpu", threads=1)
    runtime.load(model_spec(entry, CACHE))
    items: list[RunItem] = []
    each = 1
    pipe.send(0.0)
    with contextlib.suppress(EOFError):
        while True:
            match pipe.recv():
                case Case() as one:
                    items, each = _items(runtime, one), one.each
                    runtime.run(entry.key, items[:1])
                    pipe.send(0.0)
                case batch, seconds:
                    pipe.send(each * _loop(runtime, entry.key, items, batch, seconds))


def _items(runtime: Runtime, one: Case) -> list[RunItem]:
    entry = one.entry
    tokeniser = None
    if runtime.traits.accepts_ids and "text" in entry.inputs:
        bare = entry.family == "static"
        tokeniser = Tokeniser(tokenizer_path(entry, CACHE), entry.max_tokens, bare=bare)
    items = []
    for n, inputs in enumerate(one.items):
        envelope = Envelope(
            item=str(n),
            request="r",
            index=0,
            of=1,
            task=one.task,
            model=entry.id,
            revision=entry.revision,
            lane="interactive",
            cost_tokens=1,
            n_inputs=one.each,
            deadline_s=0.0,
            submitted_s=0.0,
            reply="",
            params=one.params,
        )
        run_item = prepare(entry, runtime.traits, tokeniser, envelope, inputs).run_item
        if run_item is not None:
            items.append(run_item)
    return items


def _loop(runtime: Runtime, key: str, items: list[RunItem], batch: int, seconds: float) -> float:
    """Items per second; at least one batch is run."""
    count, at, begun_s = 0, 0, time.monotonic()
    while not count or time.monotonic() - begun_s < seconds:
        chosen = items[at : at + batch]
        for outcome in runtime.run(key, chosen).outcomes:
            if isinstance(outcome, ShoalError):
                raise outcome
        count += len(chosen)
        at = at + batch if at + batch < len(items) else 0
    return count / (time.monotonic() - begun_s)
