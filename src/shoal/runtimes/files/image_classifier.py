"""Classes of images by a graph over pixels.

Options of a model:

    preparation  how a picture is made ready, by a name of `images.PREPARATIONS` (imagenet)

The size and the place of the colour axis are the graph's own, and whether it ends in a softmax is
seen by trying. Class names are in the catalog entry. Owns these findings. Does not own decoding
(`images`) or the batch (`classes`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shoal.core.spelling import did_you_mean
from shoal.errors import ModelUnavailable
from shoal.ipc.messages import ModelSpec, RunItem
from shoal.runtimes.checkpoint import locate
from shoal.runtimes.files.classes import Judged, classify
from shoal.runtimes.heads import softmax
from shoal.runtimes.holding import Outcomes
from shoal.runtimes.images import PREPARATIONS, prepared, read_image
from shoal.runtimes.onnx.session import Session

Floats = npt.NDArray[np.float32]

USUAL_FILES = ("model.onnx", "onnx/model.onnx")
_COLOURS = 3


class ImageClassifier:
    """A classifier graph."""

    def __init__(self, spec: ModelSpec, *, device: str, threads: int) -> None:
        path = locate(spec, USUAL_FILES)
        self._session = Session(path, {}, device=device, threads=threads, where=spec.key)
        self.memory_bytes = path.stat().st_size
        name = str(spec.options.get("preparation", "imagenet"))
        if name not in PREPARATIONS:
            raise ModelUnavailable(
                f"{spec.key}: option preparation is `{name}`{did_you_mean(name, PREPARATIONS)}; "
                f"known: {', '.join(PREPARATIONS)}"
            )
        self._how = PREPARATIONS[name]
        self._colours_last, self._size_px = _shape(self._session, spec.key)
        self._ends_in_softmax = False
        blank = np.zeros((1, self._size_px, self._size_px, _COLOURS), np.float32)
        tried = self._forward(blank)
        self._ends_in_softmax = bool(tried.min() >= 0 and np.isclose(tried.sum(), 1, atol=1e-3))
        self._labels = spec.labels or [f"LABEL_{i}" for i in range(tried.shape[1])]
        if len(self._labels) != tried.shape[1]:
            raise ModelUnavailable(
                f"{spec.key}: the graph has {tried.shape[1]} classes, {len(self._labels)} are named"
            )

    def run(self, items: Sequence[RunItem]) -> Outcomes:
        """Scores of all classes for every image."""
        return classify(items, self._labels, self._pixels, self._judge)

    def _pixels(self, blob: bytes) -> Floats:
        return prepared(read_image(blob), self._size_px, self._how)

    def _judge(self, pixels: Floats) -> Judged:
        found = self._forward(pixels)
        if self._ends_in_softmax:
            return {"scores": found}
        return {"scores": softmax(found), "logits": found}

    def _forward(self, pixels: Floats) -> Floats:
        """The graph's first output, float32 [n, k], for pixels float32 [n, h, w, 3]."""
        ready = pixels if self._colours_last else pixels.transpose(0, 3, 1, 2)
        feeds = {self._session.inputs[0].name: np.ascontiguousarray(ready)}
        found = self._session.run(self._session.outputs[0].name, feeds)
        return found.reshape(len(pixels), -1)


def _shape(session: Session, key: str) -> tuple[bool, int]:
    """Whether colours are the last axis, and the side in pixels."""
    shape = session.inputs[0].shape
    for colours_last, sides in ((True, shape[1:3]), (False, shape[2:4])):
        colours = shape[3:] if colours_last else shape[1:2]
        if list(colours) == [_COLOURS] and isinstance(sides[0], int) and sides[0] == sides[1]:
            return colours_last, sides[0]
    raise ModelUnavailable(f"{key}: a classifier takes square pictures, not {shape}")
