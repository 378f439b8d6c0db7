"""`shoal models add|remove|pin|unpin|apply`: changes of a running cluster's catalog.

Owns what a person sees of a change, and in which order: every fault first, then the difference,
then the writing, which fails where somebody else has changed the same meanwhile. What is written
here has the origin `command`: a `shoal serve` that starts again with its folder leaves it as it is.
Does not own how an entry comes about (`models_entry`), or what a change may do
(`shoal.catalog.change`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import typer
from msgspec import structs

from shoal.catalog.change import Changes, difference, refusals, shelf_key
from shoal.catalog.load import read
from shoal.catalog.schema import ID_PATTERN, Adapter, AnyEntry, Entry
from shoal.catalog.seed import write
from shoal.catalog.snapshot import Snapshot
from shoal.cli.endpoint import DEFAULT_URL, served_url
from shoal.cli.models_cluster import Hearing, Shelved, named, read_shelf
from shoal.cli.models_entry import Wish, proposals
from shoal.cli.models_wait import Asked, see_loaded
from shoal.cli.reach import Reach, opened
from shoal.errors import CatalogError, SettingsError
from shoal.queue.interface import Queue

SHOWN_CHARS = 120
_ENTRY_ID = re.compile(ID_PATTERN.removesuffix("$") + r"(@[A-Za-z0-9][A-Za-z0-9._-]*)?")


@dataclass(frozen=True, slots=True)
class How:
    """How a change is made. wait_s: for what was added to be loaded; None: not at all."""

    dry_run: bool = False
    yes: bool = True
    wait_s: float | None = None


def add(reach: Reach, wish: Wish, how: How) -> int:
    """Adds models, or replaces them by another revision; the exit code."""

    async def work() -> bool:
        async with opened(reach) as queue:
            shelved = await read_shelf(queue)
            made = await asyncio.to_thread(proposals, wish, shelved.snapshot)
            wanted = [one.entry for one in made]
            _check_pool(reach, wanted, how)
            ids = {entry.id for entry in wanted}
            present = [entry for entry in shelved.everything if entry.id in ids]
            changes = difference(wanted, present)
            for one in made:
                for note in one.notes:
                    print(f"note: {one.entry.id}: {note}")
            hearing = Hearing()  # from before the change: workers speak as soon as they know it
            await hearing.start(queue)
            if not await make(queue, shelved, changes, how):
                return False
            if how.wait_s is None or how.dry_run:
                return True
            asked = Asked([entry.id for entry in wanted], None, how.wait_s)
            if not await see_loaded(queue, hearing, wanted, asked):
                return False
        _print_trial(reach, wanted)
        return True

    return _run(work())


def remove(reach: Reach, names: Sequence[str], *, dry_run: bool) -> int:
    """Takes models, or adapters, out of the catalog; the exit code."""

    async def work() -> bool:
        async with opened(reach) as queue:
            shelved = await read_shelf(queue)
            found: list[AnyEntry] = []
            for name in dict.fromkeys(names):
                if name in shelved.revisions and name not in shelved.records:
                    await _forget_unreadable(queue, name, shelved, dry_run=dry_run)
                elif (entry := await _present(queue, shelved, name)) is not None:
                    found.append(entry)
            folder = [e.id for e in found if shelved.records[e.id].origin == "folder"]
            done = await make(queue, shelved, Changes(removed=tuple(found)), How(dry_run=dry_run))
        if folder and done:
            print(f"a `shoal serve` whose folder has it brings it back: {', '.join(folder)}")
        return done

    return _run(work())


def pin(reach: Reach, names: Sequence[str], *, pinned: bool) -> int:
    """Pins models, or unpins them; the exit code."""

    async def work() -> bool:
        async with opened(reach) as queue:
            shelved = await read_shelf(queue)
            entries = [named(shelved.snapshot, name) for name in names]
            wanted = [structs.replace(entry, pinned=pinned) for entry in entries]
            return await make(queue, shelved, difference(wanted, entries), How())

    return _run(work())


def apply(reach: Reach, folder: Path, how: How, *, prune: bool) -> int:
    """Makes the catalog that of a folder, after a question; the exit code."""
    entries, faults = read(folder)
    for fault in faults:
        print(fault)
    if faults:
        return 2

    async def work() -> bool:
        async with opened(reach) as queue:
            shelved = await read_shelf(queue)
            changes = difference(entries, shelved.everything)
            if not prune and changes.removed:
                ids = ", ".join(entry.id for entry in changes.removed)
                print(f"not in {folder}, and left as they are without --prune: {ids}")
                changes = replace(changes, removed=())
            return await make(queue, shelved, changes, how)

    return _run(work())


def _run(work: Coroutine[Any, Any, bool]) -> int:
    return 0 if asyncio.run(work) else 1


async def make(queue: Queue, shelved: Shelved, changes: Changes, how: How) -> bool:
    """Checks, shows and makes changes; False where nothing, or not all, was written."""
    touched = {entry.id for entry in (*changes.removed, *changes.same, *changes.added)}
    touched |= {pair.after.id for pair in changes.changed}
    others = [e for e in shelved.everything if e.id not in touched and e.id not in shelved.faults]
    reasons = refusals(changes, others)
    if reasons:
        for reason in reasons:
            typer.echo(f"refused: {reason}", err=True)
        return False
    for line in told(changes):
        print(line)
    if not changes:
        print("nothing to do")
        return True
    if how.dry_run:
        print("nothing was written (--dry-run)")
        return True
    if not how.yes:
        await asyncio.to_thread(typer.confirm, "Make these changes?", abort=True)
    try:
        await write(queue.catalog, changes, "command", shelved.revisions)
    except CatalogError as error:
        typer.echo(f"{error.message}; what comes after it was not written", err=True)
        return False
    return True


def told(changes: Changes) -> Iterator[str]:
    """The lines that tell a person of changes."""
    for entry in changes.added:
        yield f"+ {entry.key}  ({_what(entry)})"
    for pair in changes.changed:
        yield f"~ {pair.after.key}"
        for each in pair.fields:
            yield f"    {each.name}: {_shown(each.before)} -> {_shown(each.after)}"
    for entry in changes.removed:
        yield f"- {entry.key}"
    if changes.same:
        yield f"= {', '.join(entry.key for entry in changes.same)}"


def _what(entry: AnyEntry) -> str:
    if isinstance(entry, Adapter):
        return f"adapter, {entry.source}"
    return f"{' '.join(entry.tasks)}, on {entry.runtime}"


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


async def _present(queue: Queue, shelved: Shelved, name: str) -> AnyEntry | None:
    """The entry that is to go; None where it has gone before. Raises `UnknownModel`."""
    known = shelved.records.get(name)  # a record that is not served has no other names
    entry = shelved.snapshot.get(name) or (known.entry if known else None)
    if entry is not None:
        return entry
    if _ENTRY_ID.fullmatch(name) and await queue.catalog.versions(shelf_key(name)):
        print(f"{name}: is not there any more")
        return None
    if "@" in name:
        return shelved.snapshot.find(name).adapter
    return named(shelved.snapshot, name)


async def _forget_unreadable(queue: Queue, name: str, shelved: Shelved, *, dry_run: bool) -> None:
    """A record that cannot be read has no entry, and goes all the same."""
    print(f"- {name} ({shelved.faults[name]})")
    if not dry_run:
        await queue.catalog.remove(shelf_key(name), shelved.revisions[name])


def _check_pool(reach: Reach, entries: Iterable[Entry], how: How) -> None:
    pool = reach.settings().pool
    for entry in entries:
        if how.wait_s is not None and entry.pool != pool:
            raise SettingsError(f"`{entry.id}` is served by pool `{entry.pool}`: --pool names it")


def _print_trial(reach: Reach, entries: Sequence[Entry]) -> None:
    """A request to copy for each of them."""
    from shoal.cli.serve import examples

    settings = reach.settings()
    url = (served_url(settings.data_dir) if settings.nats_url is None else None) or DEFAULT_URL
    for entry in entries:
        for command in examples(Snapshot((entry,)), url)[:1]:
            print(f"try: {command}")
