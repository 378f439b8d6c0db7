"""`shoal lora train`: an adapter of an embedder, from pairs of texts.

Owns progress, the report and the exit code. Does not own the options (`lora_app`) or the training
(`shoal.train`).
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from types import FrameType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from shoal.catalog.load import load
from shoal.catalog.snapshot import Snapshot
from shoal.cli.lora import Wish as Addition
from shoal.cli.lora import proposal, usable_here
from shoal.clock import monotonic
from shoal.errors import ShoalError
from shoal.settings import let_threads_sleep
from shoal.train.card import cost, refuse_full, write
from shoal.train.encoder import open_encoder
from shoal.train.loop import Measured, Plan, Run, Step, Training
from shoal.train.measures import Measures
from shoal.train.pairs import read, split
from shoal.worker.devices import usable_cores

_ENDS = {
    "done": "",
    "time": "The time was over; the best state until then is kept.",
    "interrupted": "Interrupted; the best state until then is kept.",
    "collapsed": "It collapsed: held-out pairs are found much worse than before. Try a lower --lr.",
}


@dataclass(frozen=True, slots=True)
class Wish:
    """What a person asked for. held_out: share of the pairs to measure with."""

    base: str
    pairs: Path
    out: Path
    catalog: Path | None
    rank: int
    held_out: float
    price_per_hour: float | None
    accept_worse: bool


def train(wish: Wish, plan: Plan) -> int:
    """Trains and writes the adapter; the exit code: 1 where it is no better than its base."""
    console = Console(highlight=False)
    refuse_full(wish.out)
    catalog = load(wish.catalog)
    entry = catalog.resolve(wish.base)
    parts = split(wish.pairs, read(wish.pairs), wish.held_out, plan.seed)
    let_threads_sleep()
    with TemporaryDirectory() as cache:
        encoder = open_encoder(entry, Path(cache), threads=usable_cores())
        console.print(
            f"{entry.key}: {len(parts.trained)} pairs to train on, {len(parts.held_out)} to "
            f"measure with, rank {wish.rank}, {usable_cores()} threads",
            soft_wrap=True,
        )
        with _progress(console, wish.price_per_hour) as on_step, _interrupts() as stop:
            training = Training(encoder, plan, on_step, stop.is_set)
            run = training.run(wish.pairs, parts, wish.rank, alpha=2 * wish.rank)
        _report(console, run, wish.price_per_hour)
        if not run.better:
            console.print("It is no better than its base in rank.", style="bold")
        if run.best is None or not (run.better or wish.accept_worse):
            console.print("Nothing is written; --accept-worse would write the best state.")
            return 1
        card = write(
            wish.out,
            encoder,
            wish.pairs,
            plan,
            run,
            trained_pairs=len(parts.trained),
            price_per_hour=wish.price_per_hour,
        )
    where = "in the folder of the server, or with its --data-dir"
    console.print(f"Adapter: {wish.out}\nServe it ({where}):", soft_wrap=True, markup=False)
    name = f"{entry.id}@{wish.out.resolve().name}"
    command = _command(name, wish.out, card.digests)
    console.print(f"  {command}", soft_wrap=True, markup=False)
    why_not = _refusal(name, wish.out, catalog)
    if why_not:
        note = f"note: as the catalog is, it will be refused: {why_not}"
        console.print(note, soft_wrap=True, markup=False)
    return 0


def _command(name: str, folder: Path, digests: Mapping[str, str]) -> str:
    """What registers the adapter at a running cluster."""
    words = ["shoal", "lora", "add", name, "--source", folder.resolve().as_uri()]
    for file, digest in digests.items():
        words += ["--digest", f"{file}={digest}"]
    return shlex.join(words)


def _refusal(name: str, folder: Path, catalog: Snapshot) -> str | None:
    """Why that command would refuse the adapter, as far as is known without the cluster."""
    try:
        wish = Addition(name, str(folder.resolve()), None, [], None, None)
        proposal(wish, catalog, usable_here(None))
    except ShoalError as error:
        return error.message
    return None


@contextmanager
def _progress(console: Console, price_per_hour: float | None) -> Iterator[_Bar]:
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[cost]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield _Bar(bar, price_per_hour)


class _Bar:
    """Hears of steps and shows them; a line for each measure, which stays."""

    def __init__(self, progress: Progress, price_per_hour: float | None) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None, loss="", cost="")
        self._price_per_hour = price_per_hour
        self._begun_s = monotonic()

    def __call__(self, told: Step | Measured) -> None:
        if isinstance(told, Measured):
            self._progress.console.print(
                f"epoch {told.step.epoch}, step {told.step.number}: loss {told.step.loss:.3f}, "
                f"held-out MRR {told.measures.mrr:.3f}, recall@1 {told.measures.recall_at_1:.3f}"
            )
            return
        so_far = cost(monotonic() - self._begun_s, self._price_per_hour)
        self._progress.update(
            self._task,
            completed=told.number,
            total=told.of,
            loss=f"{told.loss:.3f}",
            cost="" if so_far is None else f"cost {so_far:.4f}",
        )


@contextmanager
def _interrupts() -> Iterator[Event]:
    """The first Ctrl-C sets the event, so that a step ends whole; the second one is as ever."""
    event = Event()

    def heard(number: int, frame: FrameType | None) -> None:
        del number, frame
        event.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, heard)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def _report(console: Console, run: Run, price_per_hour: float | None) -> None:
    if _ENDS[run.end]:
        console.print(_ENDS[run.end])
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("HELD-OUT PAIRS")
    for title in ("BEFORE", "AFTER"):
        table.add_column(title, justify="right")
    after = run.best.measures if run.best else None
    for name, title in (
        ("recall_at_1", "recall@1"),
        ("mrr", "MRR"),
        ("cosine", "cosine, own"),
        ("cosine_others", "cosine, others"),
    ):
        table.add_row(title, _figure(run.before, name), _figure(after, name))
    console.print(table)
    price = cost(run.trained_s, price_per_hour)
    paid = "" if price is None else f", {price:.4f} at {price_per_hour:g} per hour"
    kept = f"; kept: step {run.best.step.number} of {run.best.step.of}" if run.best else ""
    console.print(f"{run.trained_s:.1f} s{paid}{kept}")
    if len(run.measured) > 1:
        console.print(
            f"AFTER is the best of {len(run.measured)} measures on these same pairs, so it is a "
            "little flattered.",
            soft_wrap=True,
        )


def _figure(measures: Measures | None, name: str) -> str:
    return "-" if measures is None else f"{getattr(measures, name):.3f}"
