"""Where the files of an adapter lie on this machine, and bringing them there.

Owns the step from an adapter's entry to its folder. Does not own what is inside the files, which a
runtime reads, nor the form of sources (`sources`) and fetching them (`resolve`).
"""

from __future__ import annotations

from pathlib import Path

from shoal.catalog.progress import OnProgress, untold
from shoal.catalog.resolve import compare, resolve_source
from shoal.catalog.schema import Adapter
from shoal.catalog.sources import ADAPTER_FILES
from shoal.errors import ModelUnavailable, WeightsMissing


def adapter_folder(
    adapter: Adapter, cache_dir: Path | None, on_progress: OnProgress = untold
) -> Path:
    """The local folder of an adapter, its files fetched, there and compared.

    cache_dir: where fetched files are kept; None: nothing is fetched, nor compared. Raises
    `WeightsMissing`, and `ModelUnavailable` for files that are not the ones it means.
    """
    folder = resolve_source(
        adapter.source,
        cache_dir,
        version=adapter.revision,
        files=ADAPTER_FILES,
        on_progress=on_progress,
    )
    try:
        missing = [name for name in ADAPTER_FILES if not (folder / name).is_file()]
    except OSError as error:
        raise WeightsMissing(f"{adapter.source} cannot be read: {error}") from error
    if missing:
        raise ModelUnavailable(f"half an adapter: there is no {missing[0]} in {folder}")
    compare(adapter.source, folder, adapter.digests, cache_dir, on_progress)
    return folder
