"""A catalog entry from what the folder of a model says of itself.

Owns reading the files that training libraries leave beside the weights: `config.json`, the
`modules.json` of sentence-transformers and what it names, and the tokenizer's. A thing that no
file says is a gap, which a person has to fill; nothing is guessed. Does not own which runtime
computes an architecture (the caller says so) or whether the entry makes sense (`check`).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import CatalogError

# Of a parsed `config.json`: the runtime that computes it and its family. Raises `ShoalError`.
CodePath = Callable[[Mapping[str, Any]], tuple[str, str]]

MAX_CONFIG_BYTES = 16 * 1024 * 1024
_INDEX = "model.safetensors.index.json"
_WEIGHTS = ("model.safetensors", _INDEX, "model.onnx", "onnx/model.onnx")
_POOLING = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_MODULES = {"Transformer", "MLMTransformer", "Pooling", "Normalize", "SpladePooling"}
_PROMPT = re.compile(r"[a-z][a-z0-9_-]*")
# Their tables of positions begin behind the one of padding.
_OFFSET_POSITIONS = {"roberta", "xlm-roberta", "camembert", "mpnet"}
# A tokenizer without a longest input says so with a number that no machine can hold.
_ENDLESS_TOKENS = 1_000_000
_SCALES = {"cosine", "cos_sim", "", None}


@dataclass(slots=True)
class Derived:
    """What was found.

    Attributes:
        fields: of an entry, as they would stand in YAML.
        gaps: a field that nothing says, and what would fill it.
        notes: what the model did in its own library and does not do here.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    gaps: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Folder:
    """The parsed files of a model's folder; what is not there is empty."""

    root: Path
    config: Mapping[str, Any]
    modules: Mapping[str, Path]
    library: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        named = self.config.get("architectures") or [""]
        return str(named[0])


def derive(root: Path, code_path: CodePath) -> Derived:
    """The entry of the model in a folder. Raises `CatalogError` for one that cannot be served."""
    try:
        return _derive(root, code_path)
    except OSError as error:
        raise CatalogError(f"{root} cannot be read: {error}") from error


def _derive(root: Path, code_path: CodePath) -> Derived:
    if not root.is_dir():
        raise CatalogError(f"{root} is no folder")
    folder = _Folder(
        root,
        _json(root / "config.json"),
        _modules(root),
        _json(root / "config_sentence_transformers.json"),
    )
    found = Derived()
    weights = _weights(folder, found)
    _code(folder, weights, code_path, found)
    _ability(folder, found)
    _length(folder, found)
    _prompts(folder, found)
    if not (root / "tokenizer.json").is_file():
        found.gaps["tokenizer"] = "the folder has no tokenizer.json: where does one lie?"
    return found


def _document(path: Path) -> Any:
    """A parsed JSON file; None where there is no such file."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            raise CatalogError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes")
        return json.loads(data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CatalogError(f"{path} cannot be read: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    """A parsed JSON object; an empty one where there is no such file."""
    value = _document(path)
    if not isinstance(value, dict | None):
        raise CatalogError(f"{path} is no JSON object")
    return value or {}


def _modules(root: Path) -> dict[str, Path]:
    """The kinds of modules that a sentence-transformers model has, and their folders."""
    path = root / "modules.json"
    try:
        listed = _document(path) or []
        found = {str(m["type"]).rpartition(".")[2]: root / str(m["path"]) for m in listed}
    except (LookupError, TypeError) as error:
        raise CatalogError(f"{path} is no list of modules: {error!r}") from error
    strange = sorted(found.keys() - _MODULES)
    if strange:
        raise CatalogError(f"{path}: no runtime computes its module {', '.join(strange)}")
    return found


def _weights(folder: _Folder, found: Derived) -> str:
    """The file of the weights, its digest and an estimate of what it takes; "" where unknown."""
    root = folder.root
    usual = [name for name in _WEIGHTS if (root / name).is_file()]
    others = sorted(p.name for kind in ("*.safetensors", "*.onnx") for p in root.glob(kind))
    if usual:
        name = usual[0]
    elif len(others) == 1:
        name = found.fields["weights"] = others[0]
    elif others:
        found.gaps["weights"] = f"one of {', '.join(others)}"
        return ""
    elif (root / "pytorch_model.bin").is_file():
        raise CatalogError(
            f"{root} has its weights in a pickle: save them with safetensors "
            "(`model.save_pretrained` does), or write an entry with `allow_pickle: true`"
        )
    else:
        raise CatalogError(f"{root} has no weights in it (*.safetensors or *.onnx)")
    files = _shards(root) if name == _INDEX else [name]
    digests, size_bytes = {}, 0
    try:
        for each in files:
            with (root / each).open("rb") as file:
                digests[each] = hashlib.file_digest(file, "sha256").hexdigest()
            size_bytes += (root / each).stat().st_size
    except OSError as error:
        raise CatalogError(f"the weights cannot be read: {error}") from error
    stored = str(folder.config.get("dtype") or folder.config.get("torch_dtype"))
    widened = 2 if stored in ("float16", "bfloat16") and not name.endswith(".onnx") else 1
    found.fields |= {
        "digests": digests,
        "memory_mib": math.ceil(widened * size_bytes / 2**20 * 1.2) + 32,
    }
    return name


def _shards(root: Path) -> list[str]:
    places = _json(root / _INDEX).get("weight_map")
    if not isinstance(places, dict):
        raise CatalogError(f"{root / _INDEX} lists no files")
    return sorted({str(place) for place in places.values()})


def _code(folder: _Folder, weights: str, code_path: CodePath, found: Derived) -> None:
    if weights.endswith(".onnx"):
        found.fields |= {"runtime": "onnx", "family": "graph"}
    elif not folder.config:
        found.gaps["runtime"] = "the folder has no config.json, which says what network it is"
    else:
        runtime, family = code_path(folder.config)
        if runtime == "onnx" and weights == _INDEX:
            runtime = "torch"  # the other reads single files
        found.fields |= {"runtime": runtime, "family": family}


def _ability(folder: _Folder, found: Derived) -> None:
    """What the network's last layers give: scores, classes, entities or vectors."""
    architecture = folder.architecture
    if architecture.endswith("ForSequenceClassification"):
        labels = len(folder.config.get("id2label") or ()) or 2
        joint = labels == 1 or folder.library.get("model_type") == "CrossEncoder"
        found.fields["tasks"] = ["score" if labels == 1 else "classify"]
        if joint:
            found.fields["scorer"] = "joint"
    elif architecture.endswith("ForTokenClassification"):
        found.fields |= {"tasks": ["extract"], "extracts": ["entities"]}
    elif "SpladePooling" in folder.modules:
        _sparse(folder, found)
    elif architecture.endswith("ForMaskedLM") and "Pooling" not in folder.modules:
        found.gaps["tasks"] = "a masked-language model is asked for nothing by itself, as [encode]"
        found.gaps["outputs"] = "as {sparse: {dim: <size of the vocabulary>}}"
    elif architecture or folder.modules or found.fields.get("family") == "graph":
        _dense(folder, found)
    else:
        found.gaps["tasks"] = "as [encode, score]"


def _sparse(folder: _Folder, found: Derived) -> None:
    told = _json(folder.modules["SpladePooling"] / "config.json")
    kind = (told.get("pooling_strategy", "max"), told.get("activation_function", "relu"))
    if kind != ("max", "relu"):
        raise CatalogError(
            f"{folder.root}: no runtime pools sparse vectors by {' and '.join(kind)}"
        )
    found.fields["tasks"] = ["encode"]
    _dimension(folder, found, "sparse", "vocab_size")


def _dense(folder: _Folder, found: Derived) -> None:
    unit = "Normalize" in folder.modules
    pooling = folder.modules.get("Pooling")
    if pooling is None:
        found.gaps["pooling"] = "how token vectors become one: mean, cls or last"
    else:
        found.fields |= {"pooling": _pooling(pooling / "config.json"), "normalize": unit}
    similar = folder.library.get("similarity_fn_name")
    if similar in _SCALES or (unit and similar == "dot"):
        found.fields |= {"tasks": ["encode", "score"], "scorer": "similarity"}
    else:
        found.fields["tasks"] = ["encode"]
        found.notes.append(f"it is not asked for scores: they would be cosines, and not {similar}")
    _dimension(folder, found, "dense", "hidden_size")


def _dimension(folder: _Folder, found: Derived, output: str, key: str) -> None:
    dim = folder.config.get(key)
    if isinstance(dim, int):
        found.fields["outputs"] = {output: {"dim": dim}}
    else:
        found.gaps["outputs"] = f"how long the vectors are, as {{{output}: {{dim: 384}}}}"


def _pooling(path: Path) -> str:
    told = _json(path)
    named = told.get("pooling_mode")
    old = {k.removeprefix("pooling_mode_"): v for k, v in told.items() if v is True}
    names = [named] if isinstance(named, str) else [n.removesuffix("_token") for n in old]
    modes = [n.removesuffix("_tokens") for n in names if n != "include_prompt"]
    if len(modes) != 1 or modes[0] not in _POOLING:
        raise CatalogError(f"{path}: no runtime pools by {' and '.join(modes) or 'nothing'}")
    if told.get("include_prompt") is False:
        raise CatalogError(f"{path}: no runtime leaves a prompt out of the pooling")
    return _POOLING[modes[0]]


def _length(folder: _Folder, found: Derived) -> None:
    """The least of what the library, the tokenizer and the positions allow."""
    known = [n for n in _lengths(folder) if isinstance(n, int) and 0 < n < _ENDLESS_TOKENS]
    if known:
        found.fields["max_tokens"] = min(known)
    else:
        found.gaps["max_tokens"] = "the longest input, special tokens included"


def _lengths(folder: _Folder) -> Iterator[Any]:
    yield _json(folder.root / "sentence_bert_config.json").get("max_seq_length")
    yield _json(folder.root / "tokenizer_config.json").get("model_max_length")
    positions = folder.config.get("max_position_embeddings")
    if isinstance(positions, int):
        padding = folder.config.get("pad_token_id")
        offset = folder.config.get("model_type") in _OFFSET_POSITIONS
        yield positions - 1 - (padding if isinstance(padding, int) else 1) if offset else positions


def _prompts(folder: _Folder, found: Derived) -> None:
    told = folder.library.get("prompts")
    named = {str(k): v for k, v in told.items() if v} if isinstance(told, dict) else {}
    prompts = {name: text for name, text in named.items() if _PROMPT.fullmatch(name)}
    if prompts and "encode" in found.fields.get("tasks", ()):
        found.fields["prompts"] = prompts
    left_out = sorted(named.keys() - prompts.keys())
    if left_out:
        found.notes.append(f"left out, since its name is no prompt's here: {', '.join(left_out)}")
    default = folder.library.get("default_prompt_name")
    if default:
        found.notes.append(f"its library puts prompt `{default}` first; here a request names it")
    if _json(folder.root / "sentence_bert_config.json").get("do_lower_case"):
        found.notes.append("its library makes texts lower-case; here only its tokenizer may")
