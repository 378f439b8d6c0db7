"""`shoal models list|show`: what a running cluster holds, for people and for scripts.

Owns the looks. Does not own what is heard (`models_cluster`), nor the listing of a folder that
nobody serves (`models`).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import typer
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.catalog.change import decode_record, plain_entry, shelf_key
from shoal.catalog.estimate import memory_mib
from shoal.catalog.load import field
from shoal.catalog.schema import Adapter, AnyEntry, Entry
from shoal.catalog.snapshot import Snapshot
from shoal.cli.access import read_access
from shoal.cli.letters import plain
from shoal.cli.models_cluster import Shelved, hear_all, look, named, phase, read_shelf
from shoal.cli.reach import Reach, opened
from shoal.errors import CatalogError, SettingsError
from shoal.queue.interface import ShelfRecord
from shoal.wire.envelope import ModelState, Status

TABLE_WIDTH = 200
_MIB = 2**20
_TITLES = ("MODEL", "TASKS", "RUNTIME", "STATE", "MEMORY", "LOAD", "IDLE", "KEPT", "ALIASES")


@dataclass(frozen=True, slots=True)
class Row:
    """A model and what each live worker says of it. entry: None for one that has been replaced."""

    key: str
    entry: Entry | None
    states: dict[str, ModelState]

    @property
    def state(self) -> str:
        """The best that a worker says, in a few words."""
        states = list(self.states.values())
        copies = sum(len(s.devices) or 1 for s in states if s.state == "resident")
        if copies:
            return f"resident on {copies}"
        for wanted in ("loading", "cold", "unavailable"):
            for state in states:
                if state.state == wanted:
                    return phase(state)
        return "no worker"

    @property
    def runtimes(self) -> list[str]:
        """The runtimes that serve it, where workers choose; else its entry's."""
        chosen = sorted({state.runtime for state in self.states.values()} - {""})
        return chosen or ([self.entry.runtime] if self.entry else [])

    @property
    def memory_mib(self) -> float:
        """Of one copy, as measured; 0 while unknown."""
        return max((s.memory_bytes / _MIB for s in self.states.values()), default=0.0)

    @property
    def load_s(self) -> float:
        """What a load took last; 0 while unknown."""
        return max((s.load_s for s in self.states.values()), default=0.0)

    @property
    def idle_s(self) -> float | None:
        """Since its last batch anywhere; None where it is not loaded."""
        return min((s.idle_s for s in self.states.values() if s.state == "resident"), default=None)


def is_reachable(reach: Reach) -> bool:
    """Whether there is a cluster to ask: one is named, or a `shoal serve` runs in the folder."""
    settings = reach.settings()
    if settings.nats_url is not None:
        return True
    try:
        read_access(settings.data_dir)
    except SettingsError:
        return False
    return True


def list_models(reach: Reach, *, as_json: bool) -> int:
    """Prints the models of a cluster's pool, the workers' memories and notes; the exit code."""
    shelved, statuses = look(reach)
    pool = reach.settings().pool
    entries = [e for e in shelved.entries if e.pool == pool and e.id not in shelved.faults]
    rows = list(_rows(entries, statuses))
    if as_json:
        print(_json(_everything(rows, statuses, shelved)))
    else:
        _print(rows, statuses, shelved)
    return 0


def _rows(entries: Sequence[Entry], statuses: Sequence[Status]) -> Iterator[Row]:
    said: dict[str, dict[str, ModelState]] = {}
    for status in statuses:
        for state in status.models:
            said.setdefault(state.model, {})[status.worker] = state
    for entry in sorted(entries, key=lambda each: each.id):
        yield Row(entry.key, entry, said.pop(entry.key, {}))
    for key, states in sorted(said.items()):
        if any(state.state in ("resident", "loading") for state in states.values()):
            yield Row(key, None, states)


def _print(rows: Sequence[Row], statuses: Sequence[Status], shelved: Shelved) -> None:
    notes = (*_memories(statuses), *_notes(rows, shelved))
    print_table(_TITLES, map(_cells, rows), notes)


def print_table(
    titles: Sequence[str], rows: Iterable[Iterable[str]], notes: Iterable[str] = ()
) -> None:
    """Prints a table as wide as the terminal, its first column whole, and lines under it."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else TABLE_WIDTH)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(titles[0], no_wrap=True)
    for title in titles[1:]:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    console.print(table)
    for note in notes:
        console.print(Text(plain(note)))


def _cells(row: Row) -> Iterator[str]:
    entry = row.entry
    yield from (row.key, " ".join(entry.tasks) if entry else "", " ".join(row.runtimes))
    yield row.state if entry else f"{row.state}, replaced"
    estimate = f"~{memory_mib(entry)} MiB" if entry else ""
    yield f"{row.memory_mib:.0f} MiB" if row.memory_mib else estimate
    yield f"{row.load_s:.1f} s" if row.load_s else ""
    yield "" if row.idle_s is None else duration(row.idle_s)
    yield _kept(entry) if entry else ""
    yield " ".join(entry.aliases) if entry else ""


def _kept(entry: Entry) -> str:
    if entry.pinned:
        return f"pinned, {entry.min_replicas} copies" if entry.min_replicas > 1 else "pinned"
    if entry.min_replicas:
        return f"at least {entry.min_replicas}"
    return f"for {duration(entry.idle_timeout_s)}" if entry.idle_timeout_s else ""


def duration(seconds: float) -> str:
    """A time for people, in the unit that fits it."""
    for unit, length_s in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _memories(statuses: Sequence[Status]) -> Iterator[str]:
    yield ""
    if not statuses:
        yield "no worker is alive"
    for status in statuses:
        told = [
            f"{m.name} {m.used_bytes / _MIB:.0f} of {m.budget_bytes / _MIB:.0f} MiB"
            for m in status.memories
        ]
        leaving = ", leaving" if status.draining else ""
        devices = f"{status.devices} device{'' if status.devices == 1 else 's'}"
        yield f"{status.worker}: {', '.join((devices, *told))}{leaving}"


def _notes(rows: Sequence[Row], shelved: Shelved) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for state in row.states.values():
            if state.state == "unavailable":
                keys = reasons.setdefault(state.reason, [])
                keys += [] if row.key in keys else [row.key]
    if reasons or shelved.faults:
        yield ""
    for reason, keys in reasons.items():
        yield f"{', '.join(keys)}: {reason}"
    for name, why in shelved.faults.items():
        yield f"{name} is left out: {why}"


def _everything(
    rows: Sequence[Row], statuses: Sequence[Status], shelved: Shelved
) -> dict[str, Any]:
    return {
        "models": [
            {
                "model": row.key,
                "entry": plain_entry(row.entry) if row.entry else None,
                "origin": shelved.records[row.entry.id].origin if row.entry else None,
                "state": row.state,
                "memory_mib": row.memory_mib,
                "load_s": row.load_s,
                "idle_s": row.idle_s,
                "workers": {w: msgspec.to_builtins(s) for w, s in row.states.items()},
            }
            for row in rows
        ],
        "workers": [
            {
                "worker": status.worker,
                "devices": status.devices,
                "held_items": status.held_items,
                "draining": status.draining,
                "memories": [msgspec.to_builtins(memory) for memory in status.memories],
            }
            for status in statuses
        ],
        "faults": shelved.faults,
    }


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def show_model(reach: Reach, name: str) -> int:
    """Prints the entry of a model or an adapter, its versions and its state on each worker.

    Returns the exit code. Raises `UnknownModel`.
    """

    async def work() -> tuple[Snapshot, AnyEntry | None, list[ShelfRecord], list[Status]]:
        async with opened(reach) as queue:
            catalog = (await read_shelf(queue)).snapshot
            entry = _meant(catalog, name)
            versions = await queue.catalog.versions(shelf_key(entry.id)) if entry else []
            return catalog, entry, versions, await hear_all(queue)

    catalog, entry, versions, statuses = asyncio.run(work())
    if entry is None:
        print(_yaml(field().get(name) or named(catalog, name)))
        typer.echo(f"a model of the field; `shoal models add {name}` has it served", err=True)
        return 0
    print(_yaml(entry))
    print("versions")
    for version in versions:
        when = datetime.fromtimestamp(version.at_s, UTC).isoformat(timespec="seconds")
        print(f"  {version.revision:<6} {when}  {_said_of(version)}")
    print("workers")
    for line in _places(entry, statuses):
        print(plain(line))
    return 0


def _meant(catalog: Snapshot, name: str) -> AnyEntry | None:
    """The model or the adapter of a name; None where the catalog has no such model."""
    entry = catalog.get(name)
    if entry is not None or catalog.get(name.partition("@")[0]) is None:
        return entry
    found = catalog.find(name)
    return found.adapter or found.entry


def _places(entry: AnyEntry, statuses: Sequence[Status]) -> Iterator[str]:
    for status in statuses:
        for state in status.models:
            if isinstance(entry, Adapter):
                for at in (each for each in state.adapters if each.adapter == entry.key):
                    used = f"{at.memory_bytes / _MIB:.1f} MiB, idle for {duration(at.idle_s)}"
                    yield f"  {status.worker}  {state.model}  resident on {at.device}, {used}"
            elif state.model.rpartition("@")[0] == entry.id:
                yield f"  {status.worker}  {state.model}  {_on_worker(state)}"
                for runtime, why_not in state.others.items():
                    yield f"    not by {runtime}: {why_not}"


def _yaml(entry: AnyEntry) -> str:
    return yaml.safe_dump(plain_entry(entry), sort_keys=False, allow_unicode=True, width=100)


def _said_of(version: ShelfRecord) -> str:
    if version.data is None:
        return "removed"
    try:
        record = decode_record(version.key, version.data)
    except CatalogError as error:
        return plain(f"cannot be read: {error.message}")
    return f"revision {record.entry.revision}, by a {record.origin}"


def _on_worker(state: ModelState) -> str:
    parts = [phase(state)]
    if state.devices:
        parts = [f"resident on {', '.join(state.devices)}", f"idle for {duration(state.idle_s)}"]
    if state.runtime:
        parts.append(f"by {state.runtime}")
    if state.memory_bytes:
        parts.append(f"{state.memory_bytes / _MIB:.0f} MiB, loads in {state.load_s:.1f} s")
    if state.state == "unavailable":
        parts.append(state.reason)
    return plain(", ".join(parts))
