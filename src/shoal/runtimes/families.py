"""Which code paths the runtimes have, by name: what a catalog entry's `family` may be.

Owns the one list, gathered from each runtime's own. Does not own what a family does, nor finding
the family of a checkpoint (each runtime's). Importing it loads no runtime library.
"""

from __future__ import annotations

from shoal.runtimes import spacy, whisper
from shoal.runtimes.files import families as file_families
from shoal.runtimes.onnx import families as onnx_families
from shoal.runtimes.torch import families as torch_families


def families() -> dict[str, str]:
    """Name -> one line, of every family of every runtime, sorted by name."""
    found: dict[str, str] = {}
    for about in (
        onnx_families.ABOUT,
        file_families.ABOUT,
        spacy.ABOUT,
        torch_families.ABOUT,
        whisper.ABOUT,
    ):
        found.update(about)
    return dict(sorted(found.items()))
