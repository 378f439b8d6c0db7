"""`shoal models`, of files: a catalog as a table, its faults as a list, the models of the field.

Owns the looks. Does not own reading (`shoal.catalog`) or what a running cluster holds
(`models_list`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.bundles.definition import read as read_bundles
from shoal.bundles.shelf import Shelf
from shoal.catalog.change import parted
from shoal.catalog.load import field, load, read
from shoal.catalog.resolve import why_absent
from shoal.catalog.schema import Entry
from shoal.catalog.variants import on_runtime, runtimes_of
from shoal.errors import RuntimeUnavailable
from shoal.runtimes.registry import available
from shoal.settings import environment

TABLE_WIDTH = 200


def show(folder: Path | None) -> None:
    """Prints the models of a catalog, and why some cannot run here. Raises `CatalogError`."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("MODEL", no_wrap=True)
    for title in ("TASKS", "RUNTIME", "STATE", "ALIASES"):
        table.add_column(title, overflow="fold")
    notes: dict[str, list[str]] = {}
    for entry in load(folder).entries:
        reason = why_unusable(entry)
        if reason is not None:
            notes.setdefault(reason, []).append(entry.id)
        state = "ready" if reason is None else "missing"
        tasks, aliases = " ".join(entry.tasks), " ".join(entry.aliases)
        table.add_row(entry.key, tasks, " ".join(runtimes_of(entry)), state, aliases)
    console = Console(highlight=False)
    console.print(table)
    for reason, ids in notes.items():
        console.print(f"\n{', '.join(ids)}: {reason}", markup=False)


def show_field() -> None:
    """Prints the models of the field, and what of each has been tried."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("MODEL", "TASKS", "RUNTIME", "FAMILY", "TRIED", "REVISION", "LICENCE"):
        table.add_column(title, overflow="fold")
    for entry in field().entries:
        revision = "unknown" if entry.unpinned else entry.revision
        tried, family, licence = entry.verified, entry.family or "", entry.licence or "unknown"
        tasks = " ".join(entry.tasks)
        table.add_row(entry.id, tasks, entry.runtime, family, tried, revision, licence)
    width = None if sys.stdout.isatty() else TABLE_WIDTH
    Console(highlight=False, width=width).print(table, markup=False)


def check(folder: Path) -> int:
    """Prints every fault of a folder, or that there is none; the exit code (0 or 2)."""
    entries, faults = read(folder)
    for fault in faults:
        print(fault)
    if not faults:
        models, adapters = parted(entries)
        count = f"{len(models)} model" + ("s" if len(models) != 1 else "")
        count += f", {len(adapters)} LoRA adapters" if adapters else ""
        print(f"{folder}: {count}, no fault")
        for entry in models:
            reason = why_unusable(entry)
            if reason is not None:
                print(f"  note: {entry.id} cannot run on this machine: {reason}")
    return 2 if faults else 0


def why_unusable(entry: Entry) -> str | None:
    """Why none of a model's runtimes can run it on this machine, or None. Downloads nothing."""
    reasons = [_why_unusable(on_runtime(entry, runtime)) for runtime in runtimes_of(entry)]
    return None if None in reasons else "; ".join(filter(None, reasons))


def _why_unusable(entry: Entry) -> str | None:
    bundles = environment().get("SHOAL_BUNDLES_DIR")
    shelf = Shelf(Path(), read_bundles(Path(bundles) if bundles else None))
    try:
        if shelf.of(entry.runtime) is not None:  # built when it is first needed
            return why_absent(entry)
        return available(entry.runtime) or why_absent(entry)
    except RuntimeUnavailable as error:
        return error.message
