"""Folders of object stores (S3, Google Cloud, Azure), copied into the cache folder.

Owns the copy: only the wanted files, in pieces, continued where an earlier try ended, visible to
others only when it is whole, made by one process at a time. Access is the store library's own
matter (obstore reads `AWS_*`, `GOOGLE_*` and `AZURE_*` from the environment). Does not own which
files are wanted, or their digests.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from shoal.catalog.progress import OnProgress
from shoal.catalog.sources import local_path
from shoal.errors import WeightsMissing

MAX_LISTED = 10_000
PIECE_BYTES = 8 * 2**20
_LOCK_POLL_S = 0.1
_RETRIES = {"max_retries": 4}
# Beside the files: what is being fetched, and what is there when all of it is.
_BEGUN, _WHOLE = ".fetching.json", ".fetched.json"


def fetch(
    source: str, version: str, cache_dir: Path, files: Sequence[str], on_progress: OnProgress
) -> Path:
    """The local copy of a store's folder, made where it is not there. Raises `WeightsMissing`.

    version: of the entry; another one is fetched anew. files: patterns.
    """
    facts = json.dumps([source, version, sorted(files)])
    folder = cache_dir / hashlib.sha256(facts.encode()).hexdigest()[:24]
    try:
        if (folder / _WHOLE).is_file():
            return folder
    except OSError as error:
        raise WeightsMissing(f"{source} cannot be fetched to {cache_dir}: {error}") from error
    store = _open(source)
    try:
        copy(store, folder, files, on_progress)
    except _errors() as error:
        raise WeightsMissing(f"{source} cannot be fetched: {_first_line(error)}") from error
    return folder


def forget(file: Path) -> None:
    """Drops a file of a copy, so that the next `fetch` brings it again."""
    for folder in file.parents:
        if (folder / _WHOLE).is_file():
            (folder / _WHOLE).unlink(missing_ok=True)  # another process may be doing the same
            file.unlink(missing_ok=True)
            return


def copy(store: Any, folder: Path, files: Sequence[str], on_progress: OnProgress) -> None:
    """Copies what fits the patterns from an obstore store; the folder is whole when it returns.

    Raises `WeightsMissing` for a folder with nothing that fits, with too much in it, or that the
    disk has no room for, and what the store raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder.with_suffix(".lock"), lambda: on_progress(0, 0)):
        if (folder / _WHOLE).is_file():
            return
        listed = _listed(store, files)
        facts = json.dumps(
            [[o["path"], o["size"], o["e_tag"] or str(o["last_modified"])] for o in listed]
        )
        _begin(folder, facts)
        total_bytes = sum(o["size"] for o in listed)
        done_bytes = sum(_there_bytes(folder, o["path"]) for o in listed)
        free_bytes = shutil.disk_usage(folder).free
        if total_bytes - done_bytes > free_bytes:
            raise WeightsMissing(
                f"{folder} has {free_bytes >> 20} MiB left on its disk, and "
                f"{(total_bytes - done_bytes) >> 20} MiB are to be fetched"
            )
        for one in listed:
            for piece_bytes in _pieces(store, one, folder / one["path"]):
                done_bytes += piece_bytes
                on_progress(done_bytes, total_bytes)
        (folder / _BEGUN).replace(folder / _WHOLE)


def _listed(store: Any, files: Sequence[str]) -> list[Any]:
    """The objects that fit the patterns, by path; `path`, `size`, `e_tag`, `last_modified` each."""
    import obstore

    found: list[Any] = []
    seen = 0
    for page in obstore.list(store):
        seen += len(page)
        if seen > MAX_LISTED:
            raise WeightsMissing(f"it has more than {MAX_LISTED} objects: no folder of one model")
        found += [
            one
            for one in page
            if any(fnmatchcase(one["path"], pattern) for pattern in files)
            and local_path(one["path"]) is None
            and not one["path"].startswith(".")
        ]
    if not found:
        raise WeightsMissing(f"none of its {seen} objects fits {', '.join(files)}")
    return sorted(found, key=lambda one: str(one["path"]))


def _begin(folder: Path, facts: str) -> None:
    """Makes sure that what is in the folder are pieces of these objects, and of no earlier ones."""
    begun = folder / _BEGUN
    if begun.is_file() and begun.read_bytes() == facts.encode():
        return
    for old in folder.iterdir():
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink()
    beside = folder / f"{_BEGUN}.part"
    beside.write_text(facts, "utf-8")
    beside.replace(begun)


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _there_bytes(folder: Path, name: str) -> int:
    for path in (folder / name, _part(folder / name)):
        if path.is_file():
            return path.stat().st_size
    return 0


def _pieces(store: Any, one: Any, path: Path) -> Iterator[int]:
    """Fetches what is missing of an object; yields the bytes of each piece."""
    import obstore

    if path.is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with _part(path).open("ab") as file:
        while (at := file.tell()) < one["size"]:
            options: dict[str, Any] = {"range": (at, min(at + PIECE_BYTES, one["size"]))}
            if one["e_tag"]:
                options["if_match"] = one["e_tag"]
            yield file.write(obstore.get(store, one["path"], options=options).bytes())
        file.flush()
        os.fsync(file.fileno())
    _part(path).replace(path)


@contextmanager
def _alone(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Waits until no other process or thread is in here; the system frees it when one dies."""
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                time.sleep(_LOCK_POLL_S)
            else:
                break
        yield


def _open(source: str) -> Any:
    """The store of a source's folder."""
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise WeightsMissing(
            f"{source} needs the client of object stores: pip install 'shoal[stores]'"
        ) from error
    try:
        # Client options are left to the environment: given here, they would replace all of it.
        return from_url(source, retry_config=dict(_RETRIES))
    except _errors() as error:
        raise WeightsMissing(f"{source} cannot be opened: {_first_line(error)}") from error


def _errors() -> tuple[type[Exception], ...]:
    from obstore.exceptions import BaseError

    return (BaseError, OSError, ValueError)


def _first_line(error: Exception) -> str:
    """What a person can use of the client's words; the rest is its inner state."""
    return (str(error).splitlines() or [type(error).__name__])[0][:500]
