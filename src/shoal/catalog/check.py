"""What a catalog entry must satisfy, as data in and findings out.

Owns two checks: the shape of a YAML document against the schema, at every level and with the
exact place (`shape`), and the sense of an entry as a whole (`sense`). Does not own files.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta
from msgspec.structs import fields as struct_fields

from shoal.catalog.schema import Adapter, AnyEntry, Entry, Sampling
from shoal.catalog.sources import (
    ADAPTER_FILES,
    TOKENIZER_PICKLE,
    local_path,
    source_fault,
    weights_fault,
)
from shoal.core.spelling import did_you_mean
from shoal.ipc.messages import HeadSpec

_PROMPT = re.compile(r"[a-z][a-z0-9_-]*")
_READ_FROM: dict[str, set[str]] = {
    "entities": {"text"},
    "text": {"document", "image"},
    "layout": {"document", "image"},
    "speech": {"audio"},
}
_ALIAS = re.compile(r"[^\s@\x00-\x1f\x7f]+")


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of an entry: `path` is its place (`heads.score.kind`), empty for the whole.

    `at` is the place to look for the line, where it is another.
    """

    path: str
    what: str
    at: str = ""


def shape(value: Any, hint: Any = Entry, path: str = "") -> list[Finding]:
    """Every place where a document (plain YAML values) does not fit the schema `hint`."""
    bare, metas = _unwrap(hint)
    if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
        return _shape_of_struct(value, bare, path)
    inner: list[Finding] = []
    if get_origin(bare) is dict and isinstance(value, dict):
        key_hint, value_hint = get_args(bare)
        for key, entry in value.items():
            wrong = shape(key, key_hint, path)
            inner += wrong or shape(entry, value_hint, _join(path, str(key)))
    elif get_origin(bare) is list and isinstance(value, list):
        (item_hint,) = get_args(bare)
        for index, item in enumerate(value):
            inner += shape(item, item_hint, f"{path}[{index}]")
    return inner or _leaf(value, hint, metas, path)


def sense(entry: AnyEntry, *, served: bool = True) -> list[Finding]:
    """Every way in which the fields of an entry contradict or lack one another.

    served: False for an entry that is only known, as those of the field are: it may name a hub's
    model without a revision.
    """
    if isinstance(entry, Adapter):
        return [*_places(entry), *_adapter_files(entry)]
    return [
        *_names(entry),
        *_generating(entry),
        *(_places(entry) if served or not entry.unpinned else ()),
        *_abilities(entry),
        *_kinds_of_input(entry),
        *_keeping(entry),
        *(finding for task, head in entry.heads.items() for finding in _head(task, head)),
    ]


def _unwrap(hint: Any) -> tuple[Any, list[Meta]]:
    """The hint without Annotated and without `| None`, and the Meta objects around it."""
    metas: list[Meta] = []
    while True:
        origin = get_origin(hint)
        if origin is Annotated:
            hint, *more = get_args(hint)
            metas += [m for m in more if isinstance(m, Meta)]
        elif origin in (Union, types.UnionType):
            arms = [arm for arm in get_args(hint) if arm is not type(None)]
            if len(arms) != 1:
                return hint, metas
            hint = arms[0]
        else:
            return hint, metas


def _shape_of_struct(value: Any, kind: type[msgspec.Struct], path: str) -> list[Finding]:
    if not isinstance(value, dict):
        return [Finding(path, f"must be a mapping of fields, not {_kind(value)}")]
    hints, required = _fields(kind)
    found = [
        Finding(
            path,
            f"unknown key `{key}`{did_you_mean(str(key), hints)}",
            at=_join(path, str(key)),
        )
        for key in value
        if key not in hints
    ]
    found += [Finding(path, f"`{name}` is missing") for name in required if name not in value]
    for key, hint in hints.items():
        if key in value:
            found += shape(value[key], hint, _join(path, key))
    return found


@cache  # reading the annotations takes longer than all the rest
def _fields(kind: type[msgspec.Struct]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The hint of each field, and which fields have no default."""
    required = tuple(field.name for field in struct_fields(kind) if field.required)
    return get_type_hints(kind, include_extras=True), required


def _leaf(value: Any, hint: Any, metas: Iterable[Meta], path: str) -> list[Finding]:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        return [Finding(path, _say(value, hint, metas, str(error)))]
    return []


def _say(value: Any, hint: Any, metas: Iterable[Meta], error: str) -> str:
    bare, _ = _unwrap(hint)
    if get_origin(bare) is Literal:
        known = [str(name) for name in get_args(bare)]
        guess = did_you_mean(str(value), known)
        return f"`{value}` is none of {', '.join(known)}{guess}"
    if bare is str and isinstance(value, (bool, int, float)):
        return f"{value!r} is {_kind(value)}; put it in quotes to make it text"
    expected = [m.extra["expected"] for m in metas if m.extra and "expected" in m.extra]
    if expected and isinstance(value, str):
        return f"`{value}` must be {expected[0]}"
    return error.replace("`array`", "`list`").replace("`object`", "`mapping`")


def _kind(value: Any) -> str:
    names: dict[type, str] = {
        bool: "true/false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "a mapping",
        type(None): "empty",
    }
    return names.get(type(value), type(value).__name__)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _repeated(values: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    return [value for value in values if value in seen or seen.add(value)]  # type: ignore[func-returns-value]


def _names(entry: Entry) -> Iterator[Finding]:
    for index, alias in enumerate(entry.aliases):
        if not _ALIAS.fullmatch(alias):
            yield Finding(
                f"aliases[{index}]", f"`{alias}` must have no space, control or `@` in it"
            )
    for name in _repeated([entry.id, *entry.aliases]):
        yield Finding("aliases", f"`{name}` stands there twice, or is the id itself")
    for task in _repeated(entry.tasks):
        yield Finding("tasks", f"`{task}` stands there twice")
    for prompt in entry.prompts:
        if not _PROMPT.fullmatch(prompt):
            yield Finding(_join("prompts", prompt), "a prompt's name is a-z, 0-9, `_` and `-`")


def _places(entry: AnyEntry) -> Iterator[Finding]:
    fault = source_fault(entry.source)
    if fault:
        yield Finding("source", fault)
    if isinstance(entry, Entry):
        yield from _other_places(entry)
    for name in entry.digests:
        fault = local_path(name)
        if fault:
            yield Finding("digests", f"`{name}` {fault}")


def _adapter_files(adapter: Adapter) -> Iterator[Finding]:
    for name in adapter.digests:
        if name not in ADAPTER_FILES:
            yield Finding("digests", f"`{name}` is none of {', '.join(ADAPTER_FILES)}")


def _other_places(entry: Entry) -> Iterator[Finding]:
    fault = source_fault(entry.tokenizer) if entry.tokenizer is not None else None
    if fault:
        yield Finding("tokenizer", fault)
    if (entry.tokenizer or "").endswith(TOKENIZER_PICKLE) and not entry.allow_pickle:
        yield Finding("tokenizer", "is a pickle, which needs `allow_pickle: true`")
    fault = entry.weights and weights_fault(entry.weights, allow_pickle=entry.allow_pickle)
    if fault:
        yield Finding("weights", f"`{entry.weights}` {fault}")


def _generating(entry: Entry) -> Iterator[Finding]:
    if entry.generates and len(entry.tasks) > 1:
        yield Finding("tasks", "a generator has a process of its own: `generate` stands alone")
    if entry.sampling != Sampling() and not entry.generates:
        yield Finding("sampling", "is how texts are generated, and `tasks` is not `[generate]`")
    for at, other in enumerate(entry.alternatives):
        others = [entry.runtime, *(a.runtime for a in entry.alternatives[:at])]
        if other.runtime in others:
            yield Finding(f"alternatives[{at}].runtime", f"`{other.runtime}` stands there twice")
        fault = source_fault(other.source) if other.source is not None else None
        if fault:
            yield Finding(f"alternatives[{at}].source", fault)


def _abilities(entry: Entry) -> Iterator[Finding]:
    encodes, scores, classifies = (task in entry.tasks for task in ("encode", "score", "classify"))
    if encodes and not entry.outputs:
        yield Finding("outputs", "`encode` needs an output, such as `dense: {dim: 384}`")
    if scores and entry.scorer == "similarity" and "dense" not in entry.outputs:
        yield Finding("scorer", "`similarity` compares dense vectors: `outputs.dense` is missing")
    if scores and entry.scorer == "maxsim" and "multivector" not in entry.outputs:
        yield Finding("scorer", "`maxsim` compares token vectors: `outputs.multivector` is missing")
    if scores and entry.scorer == "head" and "score" not in entry.heads:
        yield Finding("heads", "scorer `head` needs `heads.score`")
    if "score" in entry.heads and not (scores and entry.scorer == "head"):
        yield Finding("heads.score", "is used by task `score` with `scorer: head` only")
    # A network of its own kind (one that does not encode, or reads no text) has its classifier in
    # it; a text encoder has none unless the entry says so.
    own = not encodes or entry.inputs != ["text"] or entry.labels or entry.scorer == "joint"
    if classifies and "classify" not in entry.heads and not own:
        yield Finding(
            "tasks",
            "`classify` needs `heads.classify`, the `labels` of the network's own classifier, or "
            "a model with `scorer: joint`",
        )
    if "classify" in entry.heads and not classifies:
        yield Finding("heads.classify", "is there, but `tasks` does not have `classify`")
    if entry.scorer == "joint" and not (scores or classifies):
        yield Finding("scorer", "`joint` serves `score` and `classify`, and `tasks` has neither")
    if entry.labels and not (scores or classifies or "extract" in entry.tasks):
        yield Finding("labels", "name classes, and no task of `tasks` has any")


def _kinds_of_input(entry: Entry) -> Iterator[Finding]:
    extracts = "extract" in entry.tasks
    if extracts and not entry.extracts:
        yield Finding("extracts", "`extract` needs what it returns, such as `[entities]`")
    if entry.extracts and not extracts:
        yield Finding("extracts", "is there, but `tasks` does not have `extract`")
    for index, found in enumerate(entry.extracts):
        readable = _READ_FROM[found]
        if not readable & set(entry.inputs):
            names = " or ".join(f"`{name}`" for name in sorted(readable))
            yield Finding(f"extracts[{index}]", f"`{found}` is read from {names}: see `inputs`")
    if "transcribe" in entry.tasks and "audio" not in entry.inputs:
        yield Finding("inputs", "`transcribe` listens: `audio` is missing")
    for field, values in (
        ("inputs", entry.inputs),
        ("extracts", entry.extracts),
        ("labels", entry.labels),
    ):
        for value in _repeated(values):
            yield Finding(field, f"`{value}` stands there twice")


def _keeping(entry: Entry) -> Iterator[Finding]:
    if entry.idle_timeout_s is not None and (entry.pinned or entry.min_replicas):
        kept = "pinned" if entry.pinned else "min_replicas"
        yield Finding("idle_timeout_s", f"evicts what `{kept}` keeps: choose one of them")


def _head(task: str, head: HeadSpec) -> Iterator[Finding]:
    path = f"heads.{task}"
    fault = local_path(head.file)
    if fault:
        yield Finding(f"{path}.file", f"`{head.file}` {fault}")
    elif not head.file.endswith(".safetensors") and not head.allow_pickle:
        yield Finding(
            f"{path}.file",
            f"`{head.file}` is no safetensors file; a checkpoint needs `allow_pickle: true`",
        )
    if len(head.labels) < 2:
        yield Finding(f"{path}.labels", "at least two labels, in the order of the logits")
    for label in _repeated(head.labels):
        yield Finding(f"{path}.labels", f"`{label}` stands there twice")
    if task == "score":
        if head.kind != "pair":
            yield Finding(f"{path}.kind", "a score is of two texts: the kind must be `pair`")
        if head.positive is None:
            yield Finding(
                f"{path}.positive", "is missing: the label whose probability is the score"
            )
    if head.positive is not None and head.positive not in head.labels:
        guess = did_you_mean(head.positive, head.labels)
        yield Finding(f"{path}.positive", f"`{head.positive}` is none of the labels{guess}")
