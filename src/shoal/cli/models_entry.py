"""The entries that `shoal models add` is asked for.

Owns the ways to say one: a YAML file, a model of the field by its name, `--like` another model, or
a folder that says it all itself; and `--set`, which has the last word. Does not own what a folder
says (`shoal.catalog.derive`) or what happens to the entry (`models_change`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import yaml

from shoal.catalog.change import plain_entry
from shoal.catalog.check import sense, shape
from shoal.catalog.derive import Derived, derive
from shoal.catalog.load import field as models_of_the_field
from shoal.catalog.load import read_file
from shoal.catalog.resolve import resolve_source
from shoal.catalog.schema import Entry
from shoal.catalog.snapshot import Snapshot
from shoal.catalog.sources import is_remote
from shoal.cli.models_cluster import named
from shoal.core.spelling import did_you_mean
from shoal.errors import CatalogError, ModelUnavailable, SettingsError
from shoal.runtimes.bert import BertShape
from shoal.runtimes.torch import families

FILES = (".yaml", ".yml")
_COMMIT_CHARS = 12
# What belongs to the one model and not to the way it is run.
_OWN_FIELDS = (
    "id",
    "source",
    "revision",
    "aliases",
    "digests",
    "requires",
    "licence",
    "facts",
    "description",
    "pinned",
    "min_replicas",
    "idle_timeout_s",
    "verified",
)


@dataclass(frozen=True, slots=True)
class Wish:
    """What `add` was told. sets: `field=value`."""

    names: Sequence[str]
    source: str | None = None
    like: str | None = None
    revision: str | None = None
    sets: Sequence[str] = ()
    pin: bool = False


@dataclass(frozen=True, slots=True)
class Proposal:
    """An entry to add, and what a person should know of it."""

    entry: Entry
    notes: Sequence[str] = field(default_factory=list)


def proposals(wish: Wish, catalog: Snapshot) -> list[Proposal]:
    """The entries that are wished for; `like` names one of the catalog or of the field.

    Raises `CatalogError` with every fault, `SettingsError` for what cannot be meant, and
    `UnknownModel`.
    """
    if wish.source is None and wish.like is None:
        made = [_said(name, wish) for name in wish.names]
    elif len(wish.names) != 1 or wish.names[0].endswith(FILES):
        raise SettingsError("add: --source and --like are for one model, which is given its id")
    elif wish.source is None:
        raise SettingsError("add: --like says how it is run; --source where its weights lie")
    else:
        made = [_sourced(wish.names[0], located(wish.source), wish, catalog)]
    doubled = [one.entry.id for one in made if sum(o.entry.id == one.entry.id for o in made) > 1]
    if doubled:
        raise CatalogError(f"two of them are called `{doubled[0]}`")
    return made


def located(source: str) -> str:
    """A source as entries have it: the path of a folder becomes its `file://`."""
    return source if "://" in source else f"file://{Path(source).expanduser().resolve()}"


def _said(name: str, wish: Wish) -> Proposal:
    """An entry of a file, or of the field."""
    if name.endswith(FILES):
        entry, faults = read_file(Path(name))
        if entry is None:
            raise CatalogError("\n".join(str(fault) for fault in faults))
        return Proposal(_finished(plain_entry(entry), {}, wish))
    known = models_of_the_field()
    entry = known.get(name)
    if entry is None:
        names = [n for each in known.entries for n in (each.id, *each.aliases)]
        raise CatalogError(
            f"`{name}` is no *.yaml file and no model of the field{did_you_mean(name, names, 3)}; "
            "for one of your own say where it lies: --source"
        )
    if entry.unpinned:
        raise CatalogError(
            f"`{entry.id}` has no known revision: look it up on its page and add "
            f"--source {entry.source}@<commit>"
        )
    return Proposal(_finished(plain_entry(entry), {}, wish))


def _sourced(name: str, source: str, wish: Wish, catalog: Snapshot) -> Proposal:
    """An entry for weights somewhere."""
    fields: dict[str, Any] = {"id": name}
    known = None
    if wish.like is not None:
        base = catalog.get(wish.like) or models_of_the_field().get(wish.like)
        fields |= _as_run(base or named(catalog, wish.like), source)
    elif source.startswith("hf://"):
        known = models_of_the_field().get(name)
        fields |= plain_entry(known) if known is not None else {}
    fields |= {"source": source, "revision": _revision_of(source)}
    if wish.like is not None or known is not None:
        return Proposal(_finished(fields, {}, wish))
    found = _derived(name, source)
    gaps = dict(found.gaps)
    return Proposal(_finished(found.fields | fields, gaps, wish), found.notes)


def _revision_of(source: str) -> str:
    """A hub's commit, shortened, where the source has one."""
    commit = source.partition("@")[2] if source.startswith("hf://") else ""
    return commit[:_COMMIT_CHARS] or "1"


def _as_run(base: Entry, source: str) -> dict[str, Any]:
    """How a model is run, as the fields of another."""
    fields = {k: v for k, v in plain_entry(base).items() if k not in _OWN_FIELDS}
    if base.verified != "none" and base.family is not None:
        fields["verified"] = "family"
    if not is_remote(source) and "tokenizer" not in fields:
        has_its_own = is_remote(base.source) or _has_tokenizer(base.source)
        if has_its_own and not _has_tokenizer(source):
            fields["tokenizer"] = base.source
    return fields


def _has_tokenizer(source: str) -> bool:
    root = _root(source)
    return ((root if root.is_dir() else root.parent) / "tokenizer.json").is_file()


def _derived(name: str, source: str) -> Derived:
    if is_remote(source):
        raise CatalogError(
            f"`{name}`: what lies at {source} is not looked at: say with --like which model it is "
            "run like, or write an entry (*.yaml)"
        )
    try:
        found = derive(_root(source), _code_path)
    except ModelUnavailable as error:
        raise CatalogError(f"{error.message}; or say how it is run with --like") from error
    found.fields["verified"] = "family"
    return found


def _root(source: str) -> Path:
    try:
        return resolve_source(source, None)
    except ModelUnavailable as error:
        raise CatalogError(error.message) from error


def _code_path(config: Mapping[str, Any]) -> tuple[str, str]:
    """The light runtime where it computes the network, else torch."""
    try:
        BertShape.read(config, "config.json")
    except ModelUnavailable:
        family = families.find(config, None, "config.json")
        return "torch", next(n for n, each in families.FAMILIES.items() if each is family)
    return "onnx", "bert"


def _finished(fields: Mapping[str, Any], gaps: dict[str, str], wish: Wish) -> Entry:
    """The entry, with the last word of the command's flags. Raises `CatalogError`."""
    plain = dict(fields)
    if wish.revision is not None:
        plain["revision"] = wish.revision
    if wish.pin:
        plain["pinned"] = True
    for text in wish.sets:
        place, value = _assignment(text)
        _put(plain, place, value)
        gaps.pop(place[0], None)
    name = plain["id"]
    if gaps:
        asked = [f"  --set {place}=...  {what}" for place, what in gaps.items()]
        raise CatalogError(
            "\n".join([f"`{name}`: its folder does not say all; add", *asked, "or --like MODEL"])
        )
    findings = shape(plain)
    if not findings:
        entry = msgspec.convert(plain, Entry)
        findings = sense(entry)
    if findings:
        said = (f"  {f.path}: {f.what}" if f.path else f"  {f.what}" for f in findings)
        raise CatalogError("\n".join([f"`{name}` would be no sound entry:", *said]))
    return entry


def _assignment(text: str) -> tuple[list[str], Any]:
    """`outputs.dense.dim=384` as a place and a value."""
    place, equals, written = text.partition("=")
    parts = place.split(".")
    hints = get_type_hints(Entry, include_extras=True)
    if not equals or not all(parts):
        raise SettingsError(f"--set {text}: it is field=value")
    if parts[0] not in hints:
        raise SettingsError(f"--set: no field `{parts[0]}`{did_you_mean(parts[0], hints)}")
    try:
        value = yaml.safe_load(written)
    except yaml.YAMLError as error:
        raise SettingsError(f"--set {place}: {error}") from error
    if isinstance(value, dict | list) and written.lstrip()[:1] not in ("{", "["):
        return parts, written  # a text that has a `: ` in it
    if len(parts) == 1 and not isinstance(value, str) and _fits(written, hints[place]):
        return parts, written  # `revision=2` means a text, too
    return parts, value


def _fits(text: str, hint: Any) -> bool:
    try:
        msgspec.convert(text, hint)
    except msgspec.ValidationError:
        return False
    return True


def _put(plain: dict[str, Any], place: Sequence[str], value: Any) -> None:
    at = plain
    for part in place[:-1]:
        inner = at.get(part)
        at[part] = dict(inner) if isinstance(inner, dict) else {}
        at = at[part]
    at[place[-1]] = value
