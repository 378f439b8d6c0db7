"""Models of a Hugging Face hub, in the cache folder of its own client.

Owns the call, its progress and what its errors mean. Does not own the cache: pieces, resuming,
locks among processes and the offline mode (`HF_HUB_OFFLINE`) are the client's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.catalog.progress import OnProgress
from shoal.errors import WeightsMissing


def fetch(model: str, cache_dir: Path, files: Sequence[str], on_progress: OnProgress) -> Path:
    """The folder of `<org>/<name>@<revision>`, its `files` (patterns) fetched where they are not.

    Raises `WeightsMissing`.
    """
    repo, _, revision = model.partition("@")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise WeightsMissing(
            f"hf://{model} needs the hub's client: pip install 'shoal[hub]'"
        ) from error
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=list(files),
            tqdm_class=_bar(on_progress),
        )
    except LocalEntryNotFoundError as error:
        raise WeightsMissing(
            f"hf://{model} cannot be fetched, and {cache_dir} does not have it: {error}"
        ) from error
    except (OSError, ValueError, RuntimeError, HTTPError) as error:  # of its transports, too
        raise WeightsMissing(f"hf://{model} cannot be fetched: {error}") from error
    return Path(folder)


def _bar(on_progress: OnProgress) -> type[Any]:
    """A progress bar for the client that is not drawn, and tells `on_progress` instead.

    The client makes several for one model. Those that count bytes go over the same ones (received,
    written), so the foremost is told.
    """
    from huggingface_hub.utils import tqdm

    bars: list[Bar] = []

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self.counts_bytes = options.get("unit") == "B"
            self.done = options.get("initial") or 0
            options["disable"] = True
            super().__init__(*args, **options)
            if self.counts_bytes:
                bars.append(self)

        def update(self, n: float | None = 1) -> None:
            self.done += n or 0
            if self.counts_bytes:
                total_bytes = max(int(bar.total or 0) for bar in bars)
                on_progress(max(int(bar.done) for bar in bars), total_bytes)

    return Bar
