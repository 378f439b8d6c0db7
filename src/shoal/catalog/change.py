"""What is written of the catalog for all to see, and what makes one catalog another.

Owns the record of a model or an adapter (its one form in bytes, and why one cannot be read), the
difference of two catalogs, and the reasons to refuse a change. Pure. Does not own where records are
kept (a shelf, see `follow`), who writes them (`seed`) or the sense of a single entry (`check`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import msgspec
from msgspec.structs import fields as struct_fields

from shoal.catalog.check import Finding, sense, shape
from shoal.catalog.schema import Adapter, AnyEntry, Entry
from shoal.errors import CatalogError

Origin = Literal["folder", "command"]

_SHOWN = 10  # adapters in a message

# What may change while a revision is being served: none of it changes an answer or what a line's
# items were prepared for. Every other field, also one that is yet to come, is bound to a revision.
LIVE_FIELDS = frozenset(
    {
        "aliases",
        "description",
        "facts",
        "idle_timeout_s",
        "kind",
        "licence",
        "memory_mib",
        "min_replicas",
        "pinned",
        "pool",
        "profile",
        "requires",
        "verified",
        "weight",
    }
)


class Record(msgspec.Struct, frozen=True):
    """An entry as it stands on the shelf. origin: a catalog folder, or a person's command."""

    entry: AnyEntry
    origin: Origin


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One field of an entry; the values as plain data, as they would stand in YAML."""

    name: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Changed:
    """An entry that is in both catalogs and differs."""

    before: AnyEntry
    after: AnyEntry
    fields: tuple[FieldChange, ...]


@dataclass(frozen=True, slots=True)
class Changes:
    """What leads from one catalog to another; each part in the order of the ids."""

    added: tuple[AnyEntry, ...] = ()
    changed: tuple[Changed, ...] = ()
    removed: tuple[AnyEntry, ...] = ()
    same: tuple[AnyEntry, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)


def shelf_key(entry_id: str) -> str:
    """The key of an entry's record: injective, since an id has no `=` in it."""
    return entry_id.replace(".", "=2E").replace("@", "=40")


def shelf_id(key: str) -> str:
    """The id of the entry whose record stands under a key."""
    return key.replace("=40", "@").replace("=2E", ".")


def encode_record(record: Record) -> bytes:
    """JSON of what differs from the defaults.

    So a process of an older version can read a record of a newer one, as long as the record uses
    none of the newer fields.
    """
    return msgspec.json.encode({"entry": plain_entry(record.entry), "origin": record.origin})


def plain_entry(entry: AnyEntry) -> dict[str, Any]:
    """An entry as it would stand in YAML: what differs from the defaults, in the schema's order."""
    return _trimmed(entry)


def decode_record(key: str, data: bytes) -> Record:
    """The record that stands under `key`. Raises `CatalogError` with everything that is wrong."""
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CatalogError(f"no valid JSON: {error}") from error
    if not isinstance(document, dict) or document.get("origin") not in get_args(Origin):
        raise CatalogError("no record of an entry and its origin")
    plain = document.get("entry")
    kind: type[AnyEntry] = Adapter if "@" in shelf_id(key) else Entry
    try:
        entry = msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        # Only now, for it takes a hundred times as long, every fault and its place.
        raise CatalogError(_said(shape(plain, kind)) or str(error)) from error
    if shelf_key(entry.id) != key:
        raise CatalogError(f"the record of `{entry.id}` stands under the key of another entry")
    findings = sense(entry)
    if findings:
        raise CatalogError(_said(findings))
    return Record(entry, document["origin"])


def _said(findings: Iterable[Finding]) -> str:
    return "; ".join(
        f"{found.path}: {found.what}" if found.path else found.what for found in findings
    )


def difference(wanted: Iterable[AnyEntry], present: Iterable[AnyEntry]) -> Changes:
    """What would make the catalog `present` the catalog `wanted`."""
    have = {entry.id: entry for entry in present}
    want = {entry.id: entry for entry in wanted}
    both = [(have[name], want[name]) for name in sorted(want.keys() & have.keys())]
    pairs = [Changed(old, new, changed_fields(old, new)) for old, new in both]
    return Changes(
        added=tuple(want[name] for name in sorted(want.keys() - have.keys())),
        changed=tuple(pair for pair in pairs if pair.fields),
        removed=tuple(have[name] for name in sorted(have.keys() - want.keys())),
        same=tuple(pair.after for pair in pairs if not pair.fields),
    )


def changed_fields(before: AnyEntry, after: AnyEntry) -> tuple[FieldChange, ...]:
    """The fields in which two entries differ, in the order of the schema."""
    old, new = msgspec.to_builtins(before), msgspec.to_builtins(after)
    return tuple(
        FieldChange(name, old[name], new[name])
        for name in type(after).__struct_fields__
        if old[name] != new[name]
    )


def refusals(changes: Changes, others: Iterable[AnyEntry] = ()) -> list[str]:
    """Every reason not to make these changes; empty where they may be made.

    others: entries that stay beside the catalog that was compared (of another origin, say).
    """
    after = [*changes.same, *(pair.after for pair in changes.changed), *changes.added]
    reasons = [
        f"{kind_of(entry)} `{entry.id}`: {finding.path}: {finding.what}"
        for entry in after
        for finding in sense(entry)
    ]
    gone = {entry.id for entry in changes.removed}
    staying = [*(entry for entry in others if entry.id not in gone), *after]
    left = _left_behind(changes.removed, staying)
    names = clashes(entry for entry in staying if entry.id not in left)
    return [*reasons, *not_live(changes), *dict.fromkeys(left.values()), *names.values()]


def _left_behind(removed: Iterable[AnyEntry], staying: Iterable[AnyEntry]) -> dict[str, str]:
    """The adapters whose models would go without them: their ids, each with the reason."""
    gone = {entry.id for entry in removed if isinstance(entry, Entry)}
    by_base: dict[str, list[str]] = {}
    for adapter in parted(staying)[1]:
        if adapter.base in gone:
            by_base.setdefault(adapter.base, []).append(adapter.id)
    out: dict[str, str] = {}
    for base, names in by_base.items():
        shown = " ".join(names[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")
        count = "an adapter" if len(names) == 1 else f"{len(names)} adapters"
        why = f"model `{base}` still has {count}; before it: shoal lora remove {shown}"
        out |= dict.fromkeys(names, why)
    return out


def not_live(changes: Changes) -> list[str]:
    """Why changes need another revision: requests are answered under the present one."""
    reasons: list[str] = []
    for pair in changes.changed:
        bound = [field.name for field in pair.fields if field.name not in LIVE_FIELDS]
        if bound and pair.before.revision == pair.after.revision:
            what = f"{kind_of(pair.after)} `{pair.after.id}`"
            reasons.append(
                f"{what}: a change of {', '.join(bound)} needs another "
                f"`revision` than `{pair.before.revision}`, which is being served"
            )
    return reasons


def kind_of(entry: AnyEntry) -> str:
    """What an entry is, for people."""
    return "adapter" if isinstance(entry, Adapter) else "model"


def parted(entries: Iterable[AnyEntry]) -> tuple[list[Entry], list[Adapter]]:
    """The models among entries, and the adapters, each in the given order."""
    models: list[Entry] = []
    adapters: list[Adapter] = []
    for entry in entries:
        if isinstance(entry, Adapter):
            adapters.append(entry)
        else:
            models.append(entry)
    return models, adapters


def clashes(entries: Iterable[AnyEntry]) -> dict[str, str]:
    """The entries that nobody could ask for: their ids, each with the reason.

    A model with a name that an earlier one has; its other names stay free, as if it were not
    there. An adapter of no model, or with its model's revision as its name.
    """
    models, adapters = parted(entries)
    owners: dict[str, str] = {}
    out: dict[str, str] = {}
    for entry in models:
        names = (entry.id, *entry.aliases)
        taken = [name for name in names if name in owners]
        if taken:
            owner = owners[taken[0]]
            out[entry.id] = f"model `{entry.id}`: the name `{taken[0]}` is taken by `{owner}`"
            continue
        owners.update(dict.fromkeys(names, entry.id))
    revisions = {entry.id: entry.revision for entry in models if entry.id not in out}
    for adapter in adapters:
        if adapter.base not in revisions:
            out[adapter.id] = (
                f"adapter `{adapter.id}`: no model of the catalog has the id `{adapter.base}`"
            )
        elif adapter.name == revisions[adapter.base]:
            out[adapter.id] = (
                f"adapter `{adapter.id}`: that is the name of revision `{adapter.name}` of "
                f"`{adapter.base}`"
            )
    return out


def _trimmed(value: msgspec.Struct) -> dict[str, Any]:
    """A struct as plain data without the fields that have their default, at every level."""
    plain: dict[str, Any] = {}
    for field in _fields(type(value)):
        it = getattr(value, field.name)
        if field.required or it != _default(field):
            plain[field.encode_name] = _plain(it)
    return plain


@cache  # it reads the annotations anew each time
def _fields(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return struct_fields(kind)


def _default(field: msgspec.structs.FieldInfo) -> Any:
    factory = field.default_factory
    return field.default if factory is msgspec.NODEFAULT else factory()


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _trimmed(value)
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return msgspec.to_builtins(value)
