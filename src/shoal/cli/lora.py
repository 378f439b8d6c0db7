"""`shoal lora add|list`: the adapters of a running cluster.

Owns what is looked at before an adapter is written down (where its files can be read from here),
and the looks of the list. Does not own writing (`models_change`, which removes adapters, too), or
what the files of an adapter mean (`shoal.runtimes.adapters`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import typer

from shoal.bundles.shelf import shelf_of
from shoal.catalog.adapters import adapter_folder
from shoal.catalog.change import difference, plain_entry
from shoal.catalog.check import shape
from shoal.catalog.resolve import weights_files
from shoal.catalog.schema import Adapter, Entry
from shoal.catalog.snapshot import Snapshot
from shoal.catalog.sources import ADAPTER_FILES, is_remote
from shoal.catalog.variants import on_runtime, runtimes_of
from shoal.cli.bundles import settings_of
from shoal.cli.models_change import How, make
from shoal.cli.models_cluster import Shelved, look, named, read_shelf
from shoal.cli.models_entry import located
from shoal.cli.models_list import duration, print_table
from shoal.cli.reach import Reach, opened
from shoal.errors import (
    CatalogError,
    ModelUnavailable,
    RuntimeUnavailable,
    SettingsError,
    WeightsMissing,
)
from shoal.ipc.messages import AdapterSpec
from shoal.runtimes.adapters import read_adapter
from shoal.runtimes.checkpoint import read_header
from shoal.runtimes.registry import available, facts
from shoal.wire.envelope import AdapterState, Status

_MIB = 2**20
_REVISION_DIGITS = 12
_TITLES = ("ADAPTER", "REVISION", "RESIDENT", "MEMORY", "IDLE", "SOURCE")

# Why a runtime cannot start where the workers are; it is asked with the entry and its name.
Here = Callable[[Entry, str], str | None]


@dataclass(frozen=True, slots=True)
class Wish:
    """What a person wants to add. name: `base@name`. digests: `file=sha256`."""

    name: str
    source: str
    revision: str | None
    digests: list[str]
    licence: str | None
    description: str | None


def add(reach: Reach, wish: Wish, *, dry_run: bool) -> int:
    """Adds an adapter, or another revision of one; the exit code."""

    async def work() -> bool:
        # A `shoal serve` of its own runs on this machine, and so does its worker.
        here = usable_here(reach.data_dir) if reach.settings().nats_url is None else None
        async with opened(reach) as queue:
            shelved = await read_shelf(queue)
            try:
                adapter, notes = await asyncio.to_thread(proposal, wish, shelved.snapshot, here)
            except ModelUnavailable as error:
                typer.echo(f"refused: {error.message}", err=True)
                return False
            for note in notes:
                print(f"note: {adapter.id}: {note}")
            present = [each for each in shelved.adapters if each.id == adapter.id]
            changes = difference([adapter], present)
            done = await make(queue, shelved, changes, How(dry_run=dry_run))
        if done and not dry_run:
            print(f"requests name it as their model: {adapter.id}")
        return done

    return 0 if asyncio.run(work()) else 1


def proposal(wish: Wish, catalog: Snapshot, here: Here | None) -> tuple[Adapter, list[str]]:
    """The adapter that a person means, looked at as far as it can be from here, and notes.

    here: why a runtime cannot start on the workers' machine, by its name, where that is this one;
    None where the workers are elsewhere. Raises `SettingsError`, `CatalogError`, and
    `ModelUnavailable` for files that are no adapter of that model.
    """
    model, at, name = wish.name.rpartition("@")
    if not at:
        raise SettingsError(f"`{wish.name}`: an adapter is named BASE@NAME, by its model first")
    base = named(catalog, model)
    runtime = _adapting(base, here)
    notes: list[str] = []
    if runtime != base.runtime and not any(a.base == base.id for a in catalog.adapters):
        notes.append(f"{base.id} moves from {base.runtime} to {runtime}, which takes adapters")
    before = next((each for each in catalog.adapters if each.id == f"{base.id}@{name}"), None)
    wanted = {
        "name": name,
        "base": base.id,
        "source": located(wish.source),
        "revision": wish.revision or "1",
        "digests": dict(_digest(text) for text in wish.digests),
        "licence": wish.licence or (before.licence if before else None),
        "description": wish.description or (before.description if before else ""),
    }
    faults = shape(wanted, Adapter)
    if faults:
        raise CatalogError("; ".join(f"{fault.path}: {fault.what}" for fault in faults))
    adapter = msgspec.convert(wanted, Adapter)
    if is_remote(adapter.source):
        return adapter, [*notes, "its files are looked at where it is loaded first"]
    try:
        folder = adapter_folder(adapter, None)
    except WeightsMissing as error:
        if here is not None:
            raise
        return adapter, [*notes, f"its files cannot be looked at from here: {error.message}"]
    adapter, more = _looked_at(adapter, folder, on_runtime(base, runtime), wish)
    return adapter, notes + more


def usable_here(data_dir: Path | None) -> Here:
    """Why a runtime cannot start in a `shoal serve` of this machine; None where it can."""
    bundles = shelf_of(settings_of(data_dir))

    def why_not(entry: Entry, runtime: str) -> str | None:
        try:
            missing = available(runtime)
        except RuntimeUnavailable as error:
            return error.message
        bundle = bundles.of(runtime)
        if missing is None or bundle is None:
            return missing
        # Only the bundle of an entry's own runtime is built unasked.
        built = bundles.is_built(bundle) or runtime == entry.runtime
        return None if built else f"its bundle is not built: {bundles.cure(bundle)}"

    return why_not


def _adapting(base: Entry, here: Here | None) -> str:
    """The first runtime of a model that takes adapters for it and can start.

    Raises `CatalogError` where there is none.
    """
    runtimes = runtimes_of(base)
    adapting = [name for name in runtimes if _may_adapt(on_runtime(base, name))]
    if not adapting:
        raise CatalogError(
            f"`{base.id}` runs on {' or '.join(runtimes)}, which takes no adapters for it: that "
            "needs safetensors of a text model, on torch, candle or sglang (where the option "
            "`max_adapters` says how many)"
        )
    if here is None:
        return adapting[0]
    reasons = {name: here(base, name) for name in adapting}
    usable = [name for name, why_not in reasons.items() if why_not is None]
    if not usable:
        said = "; ".join(f"{name} would take them: {why}" for name, why in reasons.items())
        raise CatalogError(f"`{base.id}` takes no adapters with what is installed here: {said}")
    return usable[0]


def _may_adapt(base: Entry) -> bool:
    try:
        adapts = facts(base.runtime).adapts
        weights = base.weights or base.source
        most = adapts.most(base.tasks, weights, base.options, base.family) if adapts else 0
    except RuntimeUnavailable:  # it is not here, and the workers may have it
        return True
    return most > 0


def _digest(text: str) -> tuple[str, str]:
    name, equals, digest = text.partition("=")
    if not equals:
        raise SettingsError(f"--digest {text!r}: write FILE=SHA256")
    return name, digest.lower()


def _looked_at(
    adapter: Adapter, folder: Path, base: Entry, wish: Wish
) -> tuple[Adapter, list[str]]:
    """The adapter with the digests of its files, and a revision by them unless one is given."""
    found = {name: _sha256(folder / name) for name in ADAPTER_FILES}
    for name, digest in adapter.digests.items():
        if found.get(name, digest) != digest:
            raise ModelUnavailable(f"{folder / name} is another file: its SHA-256 is {found[name]}")
    by_content = hashlib.sha256("".join(found.values()).encode()).hexdigest()[:_REVISION_DIGITS]
    adapter = msgspec.structs.replace(
        adapter, digests=found | adapter.digests, revision=wish.revision or by_content
    )
    file = read_adapter(AdapterSpec(adapter.key, str(folder)))
    shapes = _shapes(base)
    for module, pair in file.pairs.items() if shapes else ():
        stored = _stored(module, shapes)
        if stored is None:
            raise ModelUnavailable(
                f"{adapter.id}: {module} is no linear map of `{base.id}`: the adapter is of "
                "another base"
            )
        made_for = [len(pair.b), pair.a.shape[1]]
        if sorted(shapes[stored]) != sorted(made_for):
            raise ModelUnavailable(
                f"{adapter.id}: {module} is for a map of {made_for}, and {stored} of `{base.id}` "
                f"is {shapes[stored]}: the adapter is of another base"
            )
    return adapter, [] if shapes else ["the base's weights cannot be compared from here"]


def _stored(module: str, shapes: Iterable[str]) -> str | None:
    """The tensor of a module, by its name in the file: either may have a prefix more."""
    own = f".{module}.weight"
    fitting = [name for name in shapes if f".{name}".endswith(own) or own.endswith(f".{name}")]
    return max(fitting, key=len, default=None)


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise WeightsMissing(f"{path} cannot be read: {error}") from error


def _shapes(base: Entry) -> dict[str, list[int]]:
    """The shapes of a model's matrices, where it has safetensors that can be read from here."""
    try:
        files = [path for path in weights_files(base) if path.suffix == ".safetensors"]
        tensors = [pair for path in files for pair in read_header(path).items()]
    except ModelUnavailable:
        return {}
    return {name: shape for name, (_, shape, _, _) in tensors if len(shape) == 2}


# --- the list


@dataclass(frozen=True, slots=True)
class _Row:
    """An adapter and where it is loaded. adapter: None for one that has been replaced."""

    key: str
    adapter: Adapter | None
    places: dict[str, AdapterState]


def list_adapters(reach: Reach, *, as_json: bool) -> int:
    """Prints the adapters of a cluster; the exit code."""
    shelved, statuses = look(reach)
    rows = list(_rows(shelved, statuses))
    if as_json:
        made = {"adapters": [_everything(row, shelved) for row in rows], "faults": _faults(shelved)}
        print(msgspec.json.format(msgspec.json.encode(made), indent=2).decode())
    else:
        _print(rows, shelved)
    return 0


def _rows(shelved: Shelved, statuses: Sequence[Status]) -> Iterator[_Row]:
    said: dict[str, dict[str, AdapterState]] = {}
    for status in statuses:
        for state in (each for model in status.models for each in model.adapters):
            said.setdefault(state.adapter, {})[f"{status.worker} {state.device}"] = state
    for adapter in sorted(shelved.adapters, key=lambda each: each.id):
        if adapter.id not in shelved.faults:
            yield _Row(adapter.key, adapter, said.pop(adapter.key, {}))
    for key, places in sorted(said.items()):
        yield _Row(key, None, places)


def _faults(shelved: Shelved) -> dict[str, str]:
    return {name: why for name, why in shelved.faults.items() if "@" in name}


def _print(rows: Sequence[_Row], shelved: Shelved) -> None:
    notes = (f"{name} is left out: {why}" for name, why in _faults(shelved).items())
    print_table(_TITLES, map(_cells, rows), notes)


def _cells(row: _Row) -> Iterator[str]:
    name, _, revision = row.key.rpartition("@")
    states = list(row.places.values())
    yield from (name, revision)
    resident = f"on {len(states)}" if states else ""
    yield resident if row.adapter else f"{resident}, replaced"
    yield f"{max(s.memory_bytes for s in states) / _MIB:.1f} MiB" if states else ""
    yield duration(min(s.idle_s for s in states)) if states else ""
    yield row.adapter.source if row.adapter else ""


def _everything(row: _Row, shelved: Shelved) -> dict[str, Any]:
    return {
        "adapter": row.key,
        "entry": plain_entry(row.adapter) if row.adapter else None,
        "origin": shelved.records[row.adapter.id].origin if row.adapter else None,
        "places": {place: msgspec.to_builtins(state) for place, state in row.places.items()},
    }
