"""`shoal models bakeoff`: one model on each runtime that can run it, measured side by side.

Each runtime has a process of its own, in its bundle where it needs one, and they run one after the
other. What batches cost is written into the book that workers of the same data folder start from,
so that they can choose among the runtimes of an entry. Owns the runtimes, their processes and the
table. Does not own what is run (`bakeoff_encode`, `bakeoff_generate`), starting processes
(`shoal.worker.supervise`) or which runtimes are installed (`shoal.runtimes.probe`).
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from msgspec import structs
from rich.console import Console
from rich.table import Table

from shoal.bundles.shelf import Home, Shelf
from shoal.catalog.resolve import model_spec
from shoal.catalog.schema import Entry
from shoal.catalog.variants import on_runtime, runtimes_of
from shoal.cli.bakeoff_encode import BATCHES, EncodeFound, EncodeRun
from shoal.cli.bakeoff_generate import STREAMS, GenerateFound, GenerateRun
from shoal.clock import monotonic
from shoal.core.spelling import did_you_mean
from shoal.errors import ModelUnavailable, RuntimeFault, SettingsError
from shoal.ipc.client import RuntimeConnection
from shoal.ipc.messages import Hello, Loaded, ModelSpec
from shoal.runtimes.probe import probe
from shoal.worker.costs import CostBook
from shoal.worker.supervise import RuntimeProcess

ENCODERS = ("onnx", "torch", "candle")
STARTS = 3
MIB = 2**20
TABLE_WIDTH = 200

Found = EncodeFound | GenerateFound


@dataclass(frozen=True, slots=True)
class Row:
    """A runtime with what was found, or with why it does not run the model.

    start_s, load_s: of the process and of the model. first_answer_s: from the start of the process
    to the end of its first answer. All three are medians of `starts` starts. model_bytes: measured
    at the load. process_bytes: held after all runs, with the process's children.
    """

    runtime: str
    why_not: str | None = None
    version: str = ""
    starts: int = 0
    start_s: float = 0.0
    load_s: float = 0.0
    first_answer_s: float = 0.0
    model_bytes: int = 0
    process_bytes: int = 0
    found: Found | None = None


@dataclass(frozen=True, slots=True)
class _Started:
    """A process that has given its first answer, and the seconds that it took."""

    connection: RuntimeConnection
    hello: Hello
    loaded: Loaded
    start_s: float
    load_s: float
    first_answer_s: float


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
    if not entry.generates and ("dense" not in entry.outputs or "text" not in entry.inputs):
        raise ModelUnavailable(
            f"`{entry.id}` neither generates nor makes vectors of texts; a bakeoff compares those"
        )
    installed = bundles.complete(probe())
    costs = CostBook(setup.cache_dir / "costs.json", f"cpux{setup.threads}")
    run = GenerateRun(setup.seconds) if entry.generates else EncodeRun(setup.seconds, costs)
    rows: list[Row] = []
    for name in _chosen(entry, runtimes, installed):
        why_not = installed[name]
        if why_not is None and runtimes is None and name != entry.runtime:
            why_not = _unbuilt(bundles, name)  # gigabytes, perhaps: not unasked
        if why_not is not None:
            rows.append(Row(name, why_not))
            continue
        here = on_runtime(entry, name)
        try:
            rows.append(asyncio.run(_measured(here, run, _home(bundles, name), setup)))
        except RuntimeFault as error:
            rows.append(Row(name, error.message))
    setup.cache_dir.mkdir(parents=True, exist_ok=True)
    costs.save()
    return rows


def _chosen(
    entry: Entry, runtimes: Sequence[str] | None, installed: Mapping[str, str | None]
) -> list[str]:
    if runtimes is None:
        others = () if entry.generates else (name for name in ENCODERS if name in installed)
        named = (name for name in runtimes_of(entry) if name in installed)
        return list(dict.fromkeys([*named, *others]))
    for name in runtimes:
        if name not in installed:
            near = did_you_mean(name, installed)
            raise SettingsError(f"no runtime is called `{name}`{near}; known: {sorted(installed)}")
    return list(runtimes)


def _unbuilt(bundles: Shelf, runtime: str) -> str | None:
    """What builds the bundle that a runtime needs; None where it is built, or needs none."""
    bundle = bundles.of(runtime)
    if bundle is None or bundles.is_built(bundle):
        return None
    return f"bundle `{bundle.name}` is not built: {bundles.cure(bundle)}"


def _home(bundles: Shelf, runtime: str) -> Callable[[], Awaitable[Home | None]]:
    """Where the runtime starts, its bundle built where it has one."""

    async def home() -> Home | None:
        bundle = bundles.of(runtime)
        return None if bundle is None else await bundles.home(bundle, _say)

    return home


def _say(step: str) -> None:
    print(step, file=sys.stderr, flush=True)


async def _measured(
    entry: Entry,
    run: EncodeRun | GenerateRun,
    home: Callable[[], Awaitable[Home | None]],
    setup: Setup,
) -> Row:
    """What one runtime does. Building a bundle is no part of a start. Raises `RuntimeFault`."""
    await home()
    spec = await asyncio.to_thread(model_spec, entry, setup.cache_dir)
    begun: list[_Started] = []
    for _ in range(STARTS - 1):
        async with _started(entry, spec, run, home, setup) as started:
            begun.append(started)
    async with _started(entry, spec, run, home, setup) as started:
        begun.append(started)
        found = await run.measure(started.connection, started.loaded)
        held = await started.connection.memory()
    return Row(
        entry.runtime,
        version=started.hello.version,
        starts=len(begun),
        start_s=median(each.start_s for each in begun),
        load_s=median(each.load_s for each in begun),
        first_answer_s=median(each.first_answer_s for each in begun),
        model_bytes=started.loaded.memory_bytes,
        process_bytes=held.process_bytes,
        found=found,
    )


@asynccontextmanager
async def _started(
    entry: Entry,
    spec: ModelSpec,
    run: EncodeRun | GenerateRun,
    home: Callable[[], Awaitable[Home | None]],
    setup: Setup,
) -> AsyncIterator[_Started]:
    """A process from its start to its first answer, on a cache in which nothing is derived yet."""
    process = RuntimeProcess(
        entry.runtime, device="cpu#0", threads=setup.threads, on_lost=lambda: None, home=home
    )
    with tempfile.TemporaryDirectory() as fresh:
        try:
            begun_s = monotonic()
            connection = await process.connection()
            hello = await connection.hello
            ready_s = monotonic()
            loaded = await connection.load(structs.replace(spec, cache_dir=fresh))
            loaded_s = monotonic()
            await asyncio.to_thread(run.make_ready, entry, hello.traits, setup.cache_dir)
            await run.first(connection)
            answered_s = monotonic()
            times_s = (ready_s - begun_s, loaded_s - ready_s, answered_s - begun_s)
            yield _Started(connection, hello, loaded, *times_s)
        finally:
            await process.stop()


def show(entry: Entry, rows: Sequence[Row]) -> None:
    """Prints the table, and why a runtime is not in it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    special = GenerateFound.TITLES if entry.generates else EncodeFound.TITLES
    for title in ("RUNTIME", "START", "LOAD", "FIRST", *special, "MODEL", "PROCESS"):
        table.add_column(title, justify="left" if title == "RUNTIME" else "right", no_wrap=True)
    ran = [(row, row.found) for row in rows if row.found is not None]
    for row, found in ran:
        table.add_row(
            f"{row.runtime} {row.version}",
            *(f"{seconds:.2f} s" for seconds in (row.start_s, row.load_s, row.first_answer_s)),
            *found.cells(),
            f"{row.model_bytes / MIB:,.0f} MiB",
            f"{row.process_bytes / MIB:,.0f} MiB",
        )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else TABLE_WIDTH)
    console.print(table)
    for row in rows:
        if row.why_not is not None:
            console.print(f"{row.runtime}: {row.why_not}", markup=False, soft_wrap=True)
    if ran:
        console.print(
            f"{entry.id}: {_legend(entry, ran[0][0].runtime)}; FIRST: from the process's start to "
            "the end of its first answer, with nothing that an earlier load derived; START, LOAD "
            f"and FIRST are medians of {STARTS} starts.",
            soft_wrap=True,
        )


def _legend(entry: Entry, first: str) -> str:
    if entry.generates:
        return (
            "seconds to the first token of a text that is alone, tokens per second of "
            f"{', '.join(map(str, STREAMS))} texts at once, and how much of the likeliest texts "
            f"is as on {first}"
        )
    return (
        f"useful tokens per second in the best of batches of {', '.join(map(str, BATCHES))} "
        f"texts; the least cosine to the vectors of {first}"
    )
