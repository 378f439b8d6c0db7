"""`shoal models bakeoff`: one model on each runtime that can run it, measured side by side.

Each runtime has a process of its own, in its bundle where it needs one, and they run one after the
other. Owns the texts' lengths, the measuring and the table. Does not own starting processes
(`shoal.worker.supervise`) or which runtimes are installed (`shoal.runtimes.probe`).
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec import structs
from rich.console import Console
from rich.table import Table

from shoal.bundles.shelf import Home, Shelf
from shoal.catalog.resolve import model_spec, tokenizer_path
from shoal.catalog.schema import Entry
from shoal.cli.samples import encode_item, sentences
from shoal.clock import monotonic
from shoal.core.spelling import did_you_mean
from shoal.errors import ModelUnavailable, RuntimeFault, SettingsError
from shoal.ipc.client import RuntimeConnection
from shoal.ipc.messages import RunItem, Traits
from shoal.runtimes.probe import probe
from shoal.wire.envelope import decode_result
from shoal.worker.supervise import RuntimeProcess
from shoal.worker.tokenise import Tokeniser

Floats = npt.NDArray[np.float32]

ENCODERS = ("onnx", "torch", "candle")
BATCHES = (1, 8, 32)  # texts in a batch; the best of them counts
_TEXTS = 64
_UNIFORM_TOKENS = 64
_SHORTEST_TOKENS, _MIDDLE_TOKENS, _SPREAD = 8, 40.0, 0.8  # a lognormal mix, as texts of people are
_TOKENS_PER_WORD = 1.5  # of the sample texts, roughly; what counts is counted
_SEED = 1
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured on one runtime.

    *_tokens_per_s: useful tokens in the best size of batch. model_bytes: measured at the load.
    process_bytes: resident after all runs. cosine: the least, to the vectors of the first runtime.
    """

    version: str
    start_s: float
    load_s: float
    uniform_tokens_per_s: float
    ragged_tokens_per_s: float
    model_bytes: int
    process_bytes: int
    cosine: float = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """A runtime with what was found, or with why it does not run the model."""

    runtime: str
    found: Found | None = None
    why_not: str | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """How to measure: threads of each runtime, and seconds for each size of batch."""

    threads: int
    seconds: float
    cache_dir: Path


def bakeoff(
    entry: Entry, runtimes: Sequence[str] | None, bundles: Shelf, setup: Setup
) -> list[Row]:
    """A row for each runtime, in the order that was asked for; by default the entry's own first.

    Raises `SettingsError` for a runtime that nothing has, and `ModelUnavailable`.
    """
    if "dense" not in entry.outputs or "text" not in entry.inputs:
        raise ModelUnavailable(f"`{entry.id}` makes no vectors of texts; a bakeoff compares those")
    installed = bundles.complete(probe())
    rows: list[Row] = []
    first: Floats | None = None
    for name in _chosen(entry, runtimes, installed):
        if (why_not := installed[name]) is not None:
            rows.append(Row(name, why_not=why_not))
            continue
        here = structs.replace(entry, runtime=name)
        try:
            found, vectors = asyncio.run(_measured(here, _home(bundles, name), setup))
        except RuntimeFault as error:
            rows.append(Row(name, why_not=error.message))
            continue
        first = vectors if first is None else first
        rows.append(Row(name, replace(found, cosine=_least_cosine(vectors, first))))
    return rows


def _chosen(
    entry: Entry, runtimes: Sequence[str] | None, installed: Mapping[str, str | None]
) -> list[str]:
    if runtimes is None:
        others = [name for name in ENCODERS if name in installed]
        return list(dict.fromkeys([entry.runtime, *others]))
    for name in runtimes:
        if name not in installed:
            near = did_you_mean(name, installed)
            raise SettingsError(f"no runtime is called `{name}`{near}; known: {sorted(installed)}")
    return list(runtimes)


def _home(bundles: Shelf, runtime: str) -> Callable[[], Awaitable[Home | None]]:
    """Where the runtime starts, its bundle built where it has one."""

    async def home() -> Home | None:
        bundle = bundles.of(runtime)
        return None if bundle is None else await bundles.home(bundle, _say)

    return home


def _say(step: str) -> None:
    print(step, file=sys.stderr, flush=True)


async def _measured(
    entry: Entry, home: Callable[[], Awaitable[Home | None]], setup: Setup
) -> tuple[Found, Floats]:
    """What one runtime does, and its vectors [texts, d] of the ragged texts.

    Building a bundle is no part of a start. Raises `RuntimeFault`.
    """
    await home()
    process = RuntimeProcess(
        entry.runtime, device="cpu#0", threads=setup.threads, on_lost=lambda: None, home=home
    )
    try:
        spec = await asyncio.to_thread(model_spec, entry, setup.cache_dir)
        begun_s = monotonic()
        connection = await process.connection()
        start_s = monotonic() - begun_s
        hello = await connection.hello
        begun_s = monotonic()
        loaded = await connection.load(spec)
        load_s = monotonic() - begun_s
        traffic = _Traffic(entry, hello.traits, setup)
        uniform = await traffic.best_tokens_per_s(connection, [_UNIFORM_TOKENS] * _TEXTS)
        ragged = await traffic.best_tokens_per_s(connection, ragged_lengths(entry.max_tokens))
        vectors = await traffic.vectors(connection)
        held = await connection.memory()
    finally:
        await process.stop()
    found = Found(
        version=hello.version,
        start_s=start_s,
        load_s=load_s,
        uniform_tokens_per_s=uniform,
        ragged_tokens_per_s=ragged,
        model_bytes=loaded.memory_bytes,
        process_bytes=held.process_bytes,
    )
    return found, vectors


class _Traffic:
    """Texts of given lengths, and runs of them through one runtime.

    Tokens are counted by the model's own tokenizer, whatever the runtime says that it computed.
    """

    def __init__(self, entry: Entry, traits: Traits, setup: Setup) -> None:
        self._entry = entry
        self._traits = traits
        self._seconds = setup.seconds
        self._tokeniser = Tokeniser(
            tokenizer_path(entry, setup.cache_dir), entry.max_tokens, bare=entry.family == "static"
        )

    async def best_tokens_per_s(
        self, connection: RuntimeConnection, lengths: Sequence[int]
    ) -> float:
        """Useful tokens per second with the size of batch that does best."""
        texts = self._texts(lengths)
        tokens = [min(len(self._tokeniser.whole(t).ids), self._entry.max_tokens) for t in texts]
        items = [self._item(text) for text in texts]
        best = 0.0
        for size in BATCHES:
            batches = [
                (items[i : i + size], sum(tokens[i : i + size])) for i in range(0, len(items), size)
            ]
            await connection.run(self._entry.key, batches[0][0])  # not timed: buffers are made
            done_tokens, begun_s = 0, monotonic()
            for batch, useful in cycle(batches):
                await connection.run(self._entry.key, batch)
                done_tokens += useful
                if monotonic() - begun_s >= self._seconds:
                    break
            best = max(best, done_tokens / (monotonic() - begun_s))
        return best

    async def vectors(self, connection: RuntimeConnection) -> Floats:
        """Vectors [texts, d] of the ragged texts, in one batch."""
        items = [self._item(text) for text in self._texts(ragged_lengths(self._entry.max_tokens))]
        rows = []
        for done in (await connection.run(self._entry.key, items)).items:
            if done.failure is not None:
                raise done.failure.error()
            dense = decode_result(done.result).arrays["dense"]
            rows.append(np.frombuffer(dense.data, "<f4"))
        return np.stack(rows)

    def _item(self, text: str) -> RunItem:
        return encode_item(self._entry, self._traits, self._tokeniser, [text])

    def _texts(self, lengths: Sequence[int]) -> list[str]:
        """A text for each length, of about so many tokens: words are a little fewer."""
        words = cycle(" ".join(sentences()).split())
        return [" ".join(islice(words, max(1, round(n / _TOKENS_PER_WORD)))) for n in lengths]


def ragged_lengths(max_tokens: int) -> list[int]:
    """Lengths in tokens as texts of people have them: lognormal, the same ones each time."""
    rng = random.Random(_SEED)  # noqa: S311 - nothing secret
    drawn = (rng.lognormvariate(math.log(_MIDDLE_TOKENS), _SPREAD) for _ in range(_TEXTS))
    return [min(max_tokens, max(_SHORTEST_TOKENS, round(n))) for n in drawn]


def _least_cosine(ours: Floats, theirs: Floats) -> float:
    """The least cosine of rows [n, d]; -1 where the vectors are not of one length."""
    if ours.shape != theirs.shape:
        return -1.0
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(((a * b).sum(axis=1) / norms).min())


def show(entry: Entry, rows: Sequence[Row]) -> None:
    """Prints the table, and why a runtime is not in it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("RUNTIME", "START", "LOAD", "UNIFORM", "RAGGED", "MODEL", "PROCESS", "COSINE"):
        table.add_column(title, justify="left" if title == "RUNTIME" else "right", no_wrap=True)
    ran = [(row.runtime, row.found) for row in rows if row.found is not None]
    for runtime, found in ran:
        table.add_row(
            f"{runtime} {found.version}",
            f"{found.start_s:.2f} s",
            f"{found.load_s:.2f} s",
            f"{found.uniform_tokens_per_s:,.0f}/s",
            f"{found.ragged_tokens_per_s:,.0f}/s",
            f"{found.model_bytes / MIB:,.0f} MiB",
            f"{found.process_bytes / MIB:,.0f} MiB",
            f"{found.cosine:.6f}",
        )
    console = Console(highlight=False)
    console.print(table)
    for row in rows:
        if row.why_not is not None:
            console.print(f"{row.runtime}: {row.why_not}", markup=False, soft_wrap=True)
    if ran:
        console.print(
            f"{entry.id}: useful tokens per second in the best of batches of "
            f"{', '.join(map(str, BATCHES))} texts; the least cosine to the vectors of "
            f"{ran[0][0]}.",
            soft_wrap=True,
        )
