"""`shoal bundles`: the environments of runtimes, built ahead of need and looked at.

Owns the looks of the table and of a build's progress, and starting each runtime to hear its hello.
Does not own building (`shoal.bundles`) or the options (`bundles_app`).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.bundles.build import log_path
from shoal.bundles.definition import Bundle
from shoal.bundles.shelf import Home, Shelf, shelf_of, size_bytes
from shoal.clock import monotonic
from shoal.configuration import load
from shoal.errors import RuntimeUnavailable, ShoalError
from shoal.runtimes.probe import probe
from shoal.settings import ServeSettings, WorkerSettings, environment
from shoal.worker.supervise import RuntimeProcess


def shelf(data_dir: Path | None, cache_dir: Path | None, bundles_dir: Path | None) -> Shelf:
    """The bundles of a `shoal serve`, or with a cache folder, of a `shoal worker`."""
    return shelf_of(settings_of(data_dir, cache_dir, bundles_dir))


def settings_of(
    data_dir: Path | None, cache_dir: Path | None = None, bundles_dir: Path | None = None
) -> ServeSettings:
    """The settings of that process; `cache_dir` in them is where it keeps what it makes."""
    flags = {"data_dir": data_dir, "cache_dir": cache_dir, "bundles_dir": bundles_dir}
    settings = load(ServeSettings, flags, environment())
    if settings.cache_dir == WorkerSettings.cache_dir:
        settings = replace(settings, cache_dir=settings.data_dir / "cache")
    return settings


def show(bundles: Shelf) -> None:
    """Prints every bundle, its state and its place."""
    here = {name for name, why_not in probe().items() if why_not is None}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("BUNDLE", no_wrap=True)
    for title in ("RUNTIMES", "STATE", "MIB", "ABOUT"):
        table.add_column(title, overflow="fold")
    notes = []
    for bundle in bundles.bundles:
        place = bundles.place(bundle)
        built = bundles.is_built(bundle)
        failed = not built and log_path(place).is_file()
        state = "built" if built else "build failed" if failed else "not built"
        if set(bundle.definition.runtimes) <= here:
            state += ", not needed"
        size = f"{size_bytes(place) / 2**20:.0f}" if built else ""
        runtimes = " ".join(bundle.definition.runtimes)
        table.add_row(bundle.name, runtimes, state, size, bundle.definition.description)
        notes.append(f"{bundle.name}: {log_path(place) if failed else place}")
    console = Console(highlight=False)
    console.print(table)
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)


def build(bundles: Shelf, name: str) -> int:
    """Builds a bundle, or builds it anew where it is broken; the exit code."""
    bundle = bundles.named(name)
    if bundles.is_built(bundle):
        if check(bundles, name) == 0:
            return 0
        print(f"{name}: it is built anew")
    begun_s = monotonic()

    def on_step(step: str) -> None:
        print(f"{name}: {step} ({monotonic() - begun_s:.0f} s)", flush=True)

    place = asyncio.run(bundles.build(bundle, on_step, again=True))
    print(f"{name}: built in {monotonic() - begun_s:.0f} s: {place}")
    return check(bundles, name)


def check(bundles: Shelf, name: str | None) -> int:
    """Starts each runtime of a bundle, or of all that are built; the exit code (0 or 1)."""
    chosen = [bundles.named(name)] if name else list(filter(bundles.is_built, bundles.bundles))
    if not chosen:
        print("no bundle is built: shoal bundles list")
    faults = 0
    for bundle in chosen:
        for runtime in bundle.definition.runtimes:
            try:
                print(asyncio.run(_hello(bundles, bundle, runtime)))
            except ShoalError as error:
                faults += 1
                print(f"{bundle.name}: {error.message}")
    return 1 if faults else 0


async def _hello(bundles: Shelf, bundle: Bundle, runtime: str) -> str:
    """What a runtime says of itself. Raises `RuntimeFault`."""
    if not bundles.is_built(bundle):
        raise RuntimeUnavailable(f"it is not built: {bundles.cure(bundle)}")
    begun_s = monotonic()

    async def home() -> Home:
        return await bundles.home(bundle, print)

    process = RuntimeProcess(runtime, device="cpu#0", threads=1, on_lost=lambda: None, home=home)
    try:
        await process.connection()
    finally:
        await process.stop()
    hello = process.hello
    version = hello.version if hello is not None else "?"
    return f"{bundle.name}: runtime {runtime} {version} starts in {monotonic() - begun_s:.1f} s"
