"""A loaded image network at work: pictures in, a vector or class scores of each out.

Options of a model:

    image_px     side of the square that the network sees, in pixels (224)
    preparation  how a picture is made ready, by a name of `images.PREPARATIONS` (imagenet)

Owns these steps and one outcome per item. Does not own decoding pictures (`shoal.runtimes.images`),
selecting classes (`shoal.runtimes.files.classes`) or the network (`efficientnet`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from shoal.errors import InvalidRequest, ModelUnavailable, RunFailed, ShoalError
from shoal.ipc.messages import ModelSpec, RunItem
from shoal.runtimes.checkpoint import read_weights
from shoal.runtimes.files.classes import Judged, classify
from shoal.runtimes.heads import softmax
from shoal.runtimes.holding import each_blob
from shoal.runtimes.images import PREPARATIONS, prepared, read_image
from shoal.runtimes.interface import RanItems
from shoal.runtimes.torch.efficientnet import EfficientNet
from shoal.runtimes.torch.tensors import mapped_errors
from shoal.runtimes.vectors import as_dtype, leading, normalized
from shoal.wire.arrays import Array
from shoal.wire.envelope import Result

Floats = npt.NDArray[np.float32]

# Pictures that run as one: more of them only take more memory.
_BLOCK = 16


class LoadedPictures:
    """One image network, ready to run batches. Raises `ModelUnavailable`."""

    def __init__(self, spec: ModelSpec, path: Path, *, device: str) -> None:
        self.spec = spec
        how = str(spec.options.get("preparation", "imagenet"))
        if how not in PREPARATIONS:
            raise ModelUnavailable(
                f"{spec.key}: option preparation is one of {', '.join(PREPARATIONS)}"
            )
        self._how = PREPARATIONS[how]
        self._size_px = int(spec.options.get("image_px", 224))
        with mapped_errors(spec.key):
            weights = read_weights(path, allow_pickle=spec.allow_pickle)
            self._network = EfficientNet(weights, device=device, where=spec.key)
        self.memory_bytes = self._network.memory_bytes
        classes = self._network.classes
        self._labels = spec.labels or [f"LABEL_{i}" for i in range(classes)]
        if len(self._labels) != classes:
            raise ModelUnavailable(
                f"{spec.key}: the network has {classes} classes, {len(self._labels)} are named"
            )
        self._vectors([np.zeros((self._size_px, self._size_px, 3), np.float32)])

    def run(self, items: Sequence[RunItem], block_tokens: int | None = None) -> RanItems:
        """An outcome for each item, in order."""
        del block_tokens  # nothing is padded
        asked = [item for item in items if item.task == "classify"]
        classified = iter(classify(asked, self._labels, self._pixels, self._judge))
        outcomes: list[Result | ShoalError] = [
            next(classified) if item.task == "classify" else self._encode(item) for item in items
        ]
        return RanItems(outcomes, sum(sum(item.lengths) for item in items))

    def _encode(self, item: RunItem) -> Result | ShoalError:
        try:
            if item.task not in self.spec.tasks:
                raise InvalidRequest(f"{self.spec.key} does not {item.task}", param="model")
            vectors = self._vectors(each_blob(item, self._pixels))
            if not np.isfinite(vectors).all():
                raise RunFailed(f"{self.spec.key}: the network's numbers are not finite")
            params = item.params
            vectors = leading(vectors, params.dimensions, self.spec.key)
            if self.spec.normalize if params.normalize is None else params.normalize:
                vectors = normalized(vectors)
            return Result({"dense": Array.of(as_dtype(vectors, params.dtype))})
        except ShoalError as error:
            return error

    def _pixels(self, blob: bytes) -> Floats:
        return prepared(read_image(blob), self._size_px, self._how)

    def _vectors(self, pictures: Sequence[Floats]) -> Floats:
        """Pooled vectors, float32 [n, d], of pictures float32 [size, size, 3] each."""
        with mapped_errors(self.spec.key), torch.inference_mode():
            found = [
                self._network.vectors(np.stack(pictures[at : at + _BLOCK])).cpu().numpy()
                for at in range(0, len(pictures), _BLOCK)
            ]
        return np.concatenate(found)

    def _judge(self, pixels: Floats) -> Judged:
        """What the network says of pictures float32 [n, size, size, 3]."""
        with mapped_errors(self.spec.key), torch.inference_mode():
            network = self._network
            logits: Floats = network.logits(network.vectors(pixels)).cpu().numpy()
        return {"scores": softmax(logits), "logits": logits}
