"""Regions of a page by a PicoDet detector (Yu et al. 2021): titles, texts, tables, figures.

The graph gives, for each stride, class scores and a distribution over the distances from a cell's
middle to the four sides of its box (generalised focal loss, Li et al. 2020). Class names are in the
graph, or in the catalog entry. Owns making boxes of that and dropping doubles. Does not own pages
(`documents`) or their reading order (`order`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from PIL.Image import Image, Resampling

from shoal.errors import ModelUnavailable, RunFailed
from shoal.ipc.messages import ModelSpec, RunItem
from shoal.runtimes.checkpoint import locate
from shoal.runtimes.documents import pages
from shoal.runtimes.files.order import reading_order
from shoal.runtimes.heads import softmax
from shoal.runtimes.holding import Outcomes, each, each_blob
from shoal.runtimes.images import PREPARATIONS
from shoal.runtimes.labels import wanted
from shoal.runtimes.onnx.session import Session
from shoal.wire.envelope import Params, Result
from shoal.wire.records import Page, Record, Region, pack

Floats = npt.NDArray[np.float32]

USUAL_FILES = ("model.onnx", "layout.onnx")
_FIRST_STRIDE = 8
_LEAST_SCORE = 0.5
_SAME_REGION = 0.5
# Of each class, by score: more than a page ever has.
_CANDIDATES = 200


class Layout:
    """A detector graph."""

    def __init__(self, spec: ModelSpec, *, device: str, threads: int) -> None:
        path = locate(spec, USUAL_FILES)
        self._session = Session(path, {}, device=device, threads=threads, where=spec.key)
        self.memory_bytes = path.stat().st_size
        shape = self._session.inputs[0].shape
        if len(shape) != 4 or not all(isinstance(side, int) for side in shape[2:]):
            raise ModelUnavailable(f"{spec.key}: a detector takes [1, 3, h, w], not {shape}")
        self._height, self._width = shape[2:]
        self._labels = spec.labels or self._session.metadata.get("character", "").splitlines()
        classes = self._session.outputs[0].shape[-1]
        if len(self._labels) != classes:
            raise ModelUnavailable(
                f"{spec.key}: the graph has {classes} classes, {len(self._labels)} are named"
            )

    def run(self, items: Sequence[RunItem]) -> Outcomes:
        """A record with the regions of each page, for every input."""
        return each(items, self._answer)

    def _answer(self, item: RunItem) -> Result:
        labels = wanted(self._labels, item.params.labels)
        return Result(
            records=each_blob(
                item,
                lambda blob: pack(
                    Record(pages=[self._page(page, labels, item.params) for page in pages(blob)])
                ),
            )
        )

    def _page(self, image: Image, labels: frozenset[str], params: Params) -> Page:
        least = _LEAST_SCORE if params.threshold is None else params.threshold
        scores, boxes = self._detect(image)
        regions = [
            Region(label, _sides(boxes[at]), float(scores[at, index]))
            for index, label in enumerate(self._labels)
            if label in labels
            for at in _distinct(scores[:, index], boxes, least)
        ]
        places = np.array([region.box for region in regions], np.float32).reshape(-1, 4)
        ordered = [regions[i] for i in reading_order(places, lines=False)]
        return Page(image.width, image.height, regions=ordered)

    def _detect(self, image: Image) -> tuple[Floats, Floats]:
        """Scores float32 [cells, k], and boxes float32 [cells, 4] in pixels of the image."""
        how = PREPARATIONS["imagenet"]
        small = image.resize((self._width, self._height), Resampling.BILINEAR)
        # The networks were trained on blue, green, red with the means of red, green, blue.
        pixels = np.asarray(small, np.float32)[:, :, ::-1]
        ready = (pixels - _vector(*how.mean)) / _vector(*how.scale)
        feeds = {self._session.inputs[0].name: ready.transpose(2, 0, 1)[None].astype(np.float32)}
        found = self._session.run_all(feeds)
        if not all(np.isfinite(array).all() for array in found):
            raise RunFailed("the network's numbers are not finite")
        half = len(found) // 2
        levels = range(half)
        boxes = np.concatenate([self._boxes(found[half + i][0], i) for i in levels])
        across, down = image.width / self._width, image.height / self._height
        boxes = boxes * _vector(across, down, across, down)
        most = _vector(image.width, image.height, image.width, image.height)
        return np.concatenate([found[i][0] for i in levels]), np.clip(boxes, 0, most)

    def _boxes(self, distances: Floats, level: int) -> Floats:
        """Boxes float32 [cells, 4] of one stride, in pixels of the graph's input."""
        stride = _FIRST_STRIDE << level
        down, across = math.ceil(self._height / stride), math.ceil(self._width / stride)
        x, y = np.meshgrid(np.arange(across) + 0.5, np.arange(down) + 0.5)
        middles = np.stack([x.ravel(), y.ravel()] * 2, axis=1) * stride
        bins = distances.shape[-1] // 4
        chances = softmax(distances.reshape(-1, bins))
        sides = (chances @ np.arange(bins, dtype=np.float32)).reshape(-1, 4) * stride
        return np.asarray(middles + sides * _vector(-1, -1, 1, 1), np.float32)


def _vector(*numbers: float) -> Floats:
    return np.array(numbers, np.float32)


def _sides(box: Floats) -> tuple[float, float, float, float]:
    left, top, right, bottom = (float(side) for side in box)
    return left, top, right, bottom


def _distinct(scores: Floats, boxes: Floats, least: float) -> Iterator[int]:
    """The best boxes of one class that do not lie on a better one."""
    order = np.flatnonzero(scores > least)
    order = order[np.argsort(-scores[order], kind="stable")][:_CANDIDATES]
    while len(order):
        best, order = order[0], order[1:]
        yield int(best)
        order = order[_overlap(boxes[best], boxes[order]) <= _SAME_REGION]


def _overlap(one: Floats, others: Floats) -> Floats:
    """Intersection over union of a box with each of the others, float32 [n]."""
    sides = np.minimum(one[2:], others[:, 2:]) - np.maximum(one[:2], others[:, :2])
    shared = np.clip(sides, 0, None).prod(axis=1)
    areas = (others[:, 2:] - others[:, :2]).prod(axis=1) + (one[2:] - one[:2]).prod()
    return np.asarray(shared / np.maximum(areas - shared, 1e-6), np.float32)
