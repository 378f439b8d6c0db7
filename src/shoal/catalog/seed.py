"""Writing the catalog down for all to see.

Owns what a process that starts does with its folder (`join`, `mirror`) and the one way in which
changes are written (`write`). Does not own whether they may be made (`change.refusals`) or what
follows from them (`follow`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.catalog.change import (
    Changes,
    Origin,
    Record,
    clashes,
    decode_record,
    difference,
    encode_record,
    kind_of,
    shelf_key,
)
from shoal.catalog.follow import Shelf
from shoal.catalog.load import load
from shoal.catalog.schema import AnyEntry
from shoal.errors import CatalogError

log = logging.getLogger(__name__)


async def read_records(shelf: Shelf) -> dict[str, tuple[Record, int]]:
    """The records that can be read and their revisions, by entry id. Raises `QueueUnavailable`."""
    found: dict[str, tuple[Record, int]] = {}
    for version in await shelf.read():
        try:
            record = decode_record(version.key, version.data or b"")
        except CatalogError:
            continue  # whoever follows the shelf says so
        found[record.entry.id] = (record, version.revision)
    return found


async def join(shelf: Shelf, folder: Path | None) -> None:
    """What a process does when it starts: fills an empty shelf, and else follows it.

    folder: the catalog it was given; None for the built-in one, which is not read where there is
    another. Raises `CatalogError` and `QueueUnavailable`.
    """
    mine = None if folder is None else load(folder)
    if not await shelf.read():
        for entry in (mine or load(None)).everything:
            key = shelf_key(entry.id)
            if not await shelf.versions(key):  # what was removed stays so
                await shelf.put(key, encode_record(Record(entry, "folder")), 0)
    elif mine is not None:
        records = await read_records(shelf)
        differing = [
            entry.id
            for entry in mine.everything
            if entry.id not in records or records[entry.id][0].entry != entry
        ]
        if differing:
            log.warning(
                "the catalog in %s is not the cluster's, which is followed; they differ in %s",
                folder,
                ", ".join(differing),
            )


async def mirror(shelf: Shelf, entries: Sequence[AnyEntry]) -> None:
    """Makes what came from a folder equal to `entries`; what a command wrote stays as it is.

    For a cluster that is being started: the rule that other weights need another revision is not
    applied, since nothing runs yet. Raises `QueueUnavailable`.
    """
    records = {name: record for name, (record, _) in (await read_records(shelf)).items()}
    commanded = {name: r.entry for name, r in records.items() if r.origin == "command"}
    out = clashes([*commanded.values(), *entries])
    for entry in entries:
        if entry.id in commanded and entry != commanded[entry.id]:
            log.warning("%s `%s` stays as a command wrote it", kind_of(entry), entry.id)
        elif entry.id in out and entry.id not in commanded:
            log.warning("left out of the catalog: %s", out[entry.id])
    wanted = [e for e in entries if e.id not in out and e.id not in commanded]
    present = [record.entry for record in records.values() if record.origin == "folder"]
    await write(shelf, difference(wanted, present), "folder")


async def write(
    shelf: Shelf,
    changes: Changes,
    origin: Origin,
    revisions: Mapping[str, int] | None = None,
) -> None:
    """Makes changes that were checked, what makes a name free before what takes it.

    revisions: those of the records, by entry id, that the changes were checked against (as of
    `read_records`); where another one is found, the rest is not written and `CatalogError` says
    so. Without them whatever is there is replaced. Raises `QueueUnavailable`.
    """

    def seen(entry: AnyEntry) -> int | None:
        return None if revisions is None else revisions.get(entry.id, 0)

    for entry in changes.removed:
        if not await shelf.remove(shelf_key(entry.id), seen(entry)) and revisions is not None:
            raise CatalogError(
                f"{kind_of(entry)} `{entry.id}` was changed by someone else meanwhile"
            )
    for entry in [*(pair.after for pair in changes.changed), *changes.added]:
        data = encode_record(Record(entry, origin))
        if await shelf.put(shelf_key(entry.id), data, seen(entry)) is None:
            raise CatalogError(
                f"{kind_of(entry)} `{entry.id}` was changed by someone else meanwhile"
            )
