"""Catalog files: a folder of YAML in, entries out.

Owns reading, and gathering every fault of a folder into one `CatalogError` with file, line and
place. Does not own what is right (`check`), names (`snapshot`) or weights (`resolve`).

A folder is flat: one model, or one adapter (it has a `base`), in each `*.yaml` (or `*.yml`) file.
Hidden files and Markdown are passed over, folders are not entered; any other file is a fault, since
it was meant to be something.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml

from shoal.catalog.change import clashes, parted
from shoal.catalog.check import Finding, sense, shape
from shoal.catalog.schema import Adapter, AnyEntry, Entry
from shoal.catalog.snapshot import Snapshot
from shoal.errors import CatalogError

BUILTIN = Path(__file__).parent / "data" / "models"
FIELD = Path(__file__).parent / "data" / "field"
MAX_FILE_BYTES = 256 * 1024
MAX_DEPTH = 16
# What the library raises for a value that does not fit its own explicit tag (`!!int ""`).
_BAD_VALUES = (ValueError, LookupError, AttributeError, TypeError)


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong in a folder. `line` is 0 where no line is to blame."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.what}"


@dataclass(slots=True)
class _Document:
    """One file: its values, and the line of each place in it."""

    file: str
    value: Any = None
    lines: dict[str, int] = dataclasses.field(default_factory=dict)
    faults: list[Fault] = dataclasses.field(default_factory=list)

    def blame(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            text = f"{finding.path}: {finding.what}" if finding.path else finding.what
            self.faults.append(Fault(self.file, self._line(finding.at or finding.path), text))

    def _line(self, path: str) -> int:
        while path and path not in self.lines:
            path = path.rpartition("." if path.rfind(".") > path.rfind("[") else "[")[0]
        return self.lines.get(path, 0)


def load(folder: Path | None) -> Snapshot:
    """The catalog in `folder`, or the built-in one. Raises `CatalogError` with every fault."""
    return _builtin() if folder is None else _snapshot(folder, served=True)


@cache
def _builtin() -> Snapshot:
    return _snapshot(BUILTIN, served=True)


@cache
def field() -> Snapshot:
    """The models that people ask for, known with what their cards say; nothing serves them.

    An entry of it becomes a model to serve when it is copied into a catalog, with a revision where
    it has none (`Entry.unpinned`).
    """
    return _snapshot(FIELD, served=False)


def _snapshot(folder: Path, *, served: bool) -> Snapshot:
    entries, faults = read(folder, served=served)
    if faults:
        listed = "\n".join(f"  {fault}" for fault in faults)
        count = "an error" if len(faults) == 1 else f"{len(faults)} errors"
        raise CatalogError(f"the catalog in {folder} has {count}:\n{listed}")
    return Snapshot(*parted(entries))


def read(folder: Path, *, served: bool = True) -> tuple[list[AnyEntry], list[Fault]]:
    """The sound entries of a folder and every fault of the others. served: see `check.sense`."""
    try:
        if not folder.is_dir():
            return [], [Fault(str(folder), 0, "there is no such folder")]
        files = [p for p in sorted(folder.iterdir()) if p.is_file() and p.name[0] != "."]
    except OSError as error:
        return [], [Fault(str(folder), 0, f"cannot be read: {error}")]
    entries: list[tuple[_Document, AnyEntry]] = []
    faults: list[Fault] = []
    for path in files:
        if path.suffix == ".md":
            continue
        if path.suffix not in (".yaml", ".yml"):
            what = "unknown file type; catalog entries are *.yaml files"
            faults.append(Fault(path.name, 0, what))
            continue
        document = _read_document(path)
        entry = _entry(document, served=served)
        faults += document.faults
        if entry is not None:
            entries.append((document, entry))
    if not entries and not faults:
        faults.append(Fault(str(folder), 0, "there is no *.yaml file in it"))
    faults += _clashes(entries)
    faults += _lost_adapters(entries)
    return [entry for _, entry in entries], faults


def read_file(path: Path) -> tuple[Entry | None, list[Fault]]:
    """The model in one file, or every fault of it."""
    document = _read_document(path)
    entry = _entry(document, served=True)
    if isinstance(entry, Adapter):
        return None, [Fault(path.name, 0, "an adapter, not a model: see `shoal lora add`")]
    return entry, document.faults


def _entry(document: _Document, *, served: bool) -> AnyEntry | None:
    if document.faults:
        return None
    is_adapter = isinstance(document.value, dict) and "base" in document.value
    kind: type[AnyEntry] = Adapter if is_adapter else Entry
    document.blame(shape(document.value, kind))
    if document.faults:
        return None
    entry = msgspec.convert(document.value, kind)
    document.blame(sense(entry, served=served))
    return None if document.faults else entry


def _clashes(entries: Iterable[tuple[_Document, AnyEntry]]) -> Iterator[Fault]:
    owners: dict[str, tuple[str, str]] = {}
    for document, entry in entries:
        aliases = entry.aliases if isinstance(entry, Entry) else ()
        for name in (entry.id, *aliases):
            file, other = owners.setdefault(name, (document.file, entry.id))
            if file == document.file:
                continue
            at = "name" if isinstance(entry, Adapter) else "id"
            line = document.lines.get(at if name == entry.id else "aliases", 0)
            kind = "id" if name == entry.id == other else "name"
            what = f"{kind} `{name}` is taken by `{other}` in {file}"
            yield Fault(document.file, line, what)


def _lost_adapters(entries: Sequence[tuple[_Document, AnyEntry]]) -> Iterator[Fault]:
    lost = clashes(entry for _, entry in entries)
    for document, entry in entries:
        if isinstance(entry, Adapter) and entry.id in lost:
            yield Fault(document.file, document.lines.get("base", 0), lost[entry.id])


def _read_document(path: Path) -> _Document:
    document = _Document(path.name)
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        _parse(data, document)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        document.faults.append(Fault(path.name, line, f"no valid YAML: {error.problem}"))
    except (yaml.YAMLError, OSError, *_BAD_VALUES) as error:
        document.faults.append(Fault(path.name, 0, f"cannot be read: {error}"))
    return document


def _parse(data: bytes, document: _Document) -> None:
    """Fills the document's values and lines. Raises what YAML raises, and `_BAD_VALUES`."""
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
    loader = _Loader(data)
    try:
        node = loader.get_single_node()
        if node is None:
            raise ValueError("the file is empty")
        document.faults += _walk(node, "", document)
        if not document.faults:
            document.value = loader.construct_document(node)
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """The safe loader without anchors and depths: a cycle, or a very deep file, is no entry."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """One node. Raises on an alias (`*name`) and on a node too deep."""
        fault = None
        if self.check_event(yaml.AliasEvent):
            fault = "anchors and aliases are not supported; write it out"
        elif self.depth >= MAX_DEPTH:
            fault = f"nested more than {MAX_DEPTH} levels deep"
        if fault:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, fault, mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _walk(node: yaml.Node, path: str, document: _Document) -> Iterator[Fault]:
    """Notes the line of every place; yields a fault for each key that stands twice."""
    document.lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _walk(item, f"{path}[{index}]", document)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            yield Fault(document.file, line, "a key must be plain text")
            continue
        place = f"{path}.{key.value}" if path else key.value
        if key.value in seen:
            first = document.lines[place]
            what = f"{place}: key `{key.value}` stands there twice (first in line {first})"
            yield Fault(document.file, line, what)
        seen.add(key.value)
        document.lines.setdefault(place, line)
        yield from _walk(value, place, document)
