"""What a source says: its scheme, its form, and which files may come from it.

Owns the rules of text alone. Does not own looking for anything (`resolve`) or fetching it (`hub`,
`stores`), so that a catalog can be checked on a machine that has none of the weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from urllib.parse import unquote

HUB = "hf"
STORES = ("s3", "gs", "az")

MOVING_REVISIONS = frozenset({"main", "master", "head", "latest", "refs/heads/main"})
# Files that hold tensors and nothing that runs; a pickle may run anything when it is read.
WEIGHT_SUFFIXES = (".safetensors", ".onnx", ".gguf")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
TOKENIZER_PICKLE = ".pkl"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")  # as PEFT names them
# Configurations, vocabularies and tokenizers.
_DATA_PATTERNS = ("*.json", "*.txt", "*.model")
_ONNX_DATA_PATTERNS = ("*.onnx_data", "*.onnx.data")

_PACKAGE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_HF_REPO = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def source_fault(source: str) -> str | None:
    """What is wrong with the form of a source, or None. Whether it exists is not asked."""
    scheme, _, rest = source.partition("://")
    rule = _RULES.get(scheme)
    known = ", ".join(_RULES)
    return rule(rest) if rule else f"unknown scheme `{scheme}`; there are {known}"


def is_remote(source: str) -> bool:
    """Whether its files have to be fetched before they can be used."""
    return source.partition("://")[0] in (HUB, *STORES)


def weights_fault(name: str, *, allow_pickle: bool) -> str | None:
    """Why a file inside a source may not hold weights, or None."""
    fault = local_path(name)
    if fault or name.endswith(WEIGHT_SUFFIXES):
        return fault
    if not name.endswith(PICKLE_SUFFIXES):
        known = ", ".join(f"*{suffix}" for suffix in WEIGHT_SUFFIXES)
        return f"is an unknown file type; known are {known}"
    return None if allow_pickle else "is a pickle, which needs `allow_pickle: true`"


def wanted_files(weights: str | None, heads: Sequence[str], *, allow_pickle: bool) -> list[str]:
    """Patterns of the files to fetch: weights, heads, and the small files beside them.

    weights: the one file that is named; None for every file that may hold weights.
    """
    if weights is not None:
        return [*_DATA_PATTERNS, weights, f"{weights}_data", f"{weights}.data", *heads]
    suffixes = (*WEIGHT_SUFFIXES, *(PICKLE_SUFFIXES if allow_pickle else ()))
    return [*_DATA_PATTERNS, *(f"*{suffix}" for suffix in suffixes), *_ONNX_DATA_PATTERNS, *heads]


def tokenizer_files() -> list[str]:
    """Patterns of the files to fetch where only a tokenizer is wanted."""
    return list(_DATA_PATTERNS)


def local_path(path: str) -> str | None:
    """Why `path` is no plain relative path below its folder, or None when it is one."""
    parts = path.split("/")
    if path.startswith("/") or "\\" in path or "\0" in path:
        return "must be a relative path with `/` between its parts"
    if any(part in ("", ".", "..") for part in parts):
        return "must not have empty, `.` or `..` parts"
    return None


def _file_fault(rest: str) -> str | None:
    return None if rest.startswith("/") else "file:// takes an absolute path (file:///...)"


def _package_fault(rest: str) -> str | None:
    package, _, path = rest.partition("/")
    if not _PACKAGE_NAME.fullmatch(package):
        return f"`{package}` is no import name of a top-level package"
    fault = local_path(path) if path else None
    return f"`{path}` {fault}" if fault else None


def _hub_fault(rest: str) -> str | None:
    repo, _, revision = rest.partition("@")
    if not revision:
        return "hf:// needs a pinned revision: hf://<org>/<name>@<commit or tag>"
    if revision.lower() in MOVING_REVISIONS:
        return f"`{revision}` moves; pin a commit or a tag"
    return None if _HF_REPO.fullmatch(repo) else f"`{repo}` is no <org>/<name>"


def _store_fault(rest: str) -> str | None:
    bucket, _, path = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        return f"`{bucket}` is no name of a bucket or container"
    # A store's client reads the source as a URL: what it would unquote or cut off is refused.
    if unquote(path) != path or "?" in path or "#" in path:
        return f"`{path}` must not have `?`, `#` or quoted characters"
    fault = local_path(path) if path else "is missing: the folder of the model in the bucket"
    return f"`{path}` {fault}" if fault else None


_RULES: dict[str, Callable[[str], str | None]] = {
    "package": _package_fault,
    "file": _file_fault,
    HUB: _hub_fault,
    **dict.fromkeys(STORES, _store_fault),
}
