"""Lines of text on a page: detect, recognise, and turn lines upright where that reads better.

The steps between the three graphs are those of the library `rapidocr`, given the model's own files,
so that it fetches none. A model is a folder with one graph each whose names have `det`, `cls` and
`rec` in them. Owns the call and the records. Does not own pages (`documents`) or their reading
order (`order`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL.Image import Image, Resampling
from PIL.Image import new as new_image

from shoal.clock import monotonic
from shoal.errors import CapacityError, InvalidRequest, ModelUnavailable, RunFailed
from shoal.ipc.messages import ModelSpec, RunItem
from shoal.runtimes.documents import pages
from shoal.runtimes.files.order import reading_order
from shoal.runtimes.holding import Outcomes, each, each_blob
from shoal.wire.envelope import Params, Result
from shoal.wire.records import Page, Record, TextBox, pack

_LEAST_SCORE = 0.5
_DOUBTFUL = 0.85
# The library enlarges a page until its shorter side is long enough to find lines on: a slender one
# would become huge.
_MOST_SLENDER = 4
# It makes larger pages smaller, but not before copying them as they are.
_LONGEST_SIDE_PX = 4_096
# A batch that is not done within `run_timeout_s` costs the process. A dense page takes twenty
# seconds on a core, and the last one may begin at the very end of this time.
MAX_READING_S = 90.0
_BLANK_PX = 320


class Ocr:
    """The three graphs and the library's steps between them."""

    def __init__(self, spec: ModelSpec, *, device: str, threads: int) -> None:
        import cv2
        from rapidocr import RapidOCR

        cv2.setNumThreads(threads)  # of this process: all its models have as many
        files = {part: _only(Path(spec.path), part, spec.key) for part in ("det", "cls", "rec")}
        kind, _, index = device.partition(":")
        engine = "EngineConfig.onnxruntime"
        self._ocr: Any = RapidOCR(
            params={
                "Global.log_level": "error",
                "Det.model_path": str(files["det"]),
                "Cls.model_path": str(files["cls"]),
                "Rec.model_path": str(files["rec"]),
                f"{engine}.intra_op_num_threads": threads,
                f"{engine}.inter_op_num_threads": 1,
                f"{engine}.use_cuda": kind == "cuda",
                f"{engine}.cuda_ep_cfg.device_id": int(index or 0),
            }
        )
        # It opens each graph at its first use; a load that succeeded must have opened all.
        blank = np.full((_BLANK_PX, _BLANK_PX, 3), 255, np.uint8)
        self._ocr(blank, use_det=False, use_cls=True, use_rec=True)
        self._ocr(blank, use_det=True)
        for part in (self._ocr.text_det, self._ocr.text_cls, self._ocr.text_rec):
            part.session = _finite(part.session)
        self.memory_bytes = sum(path.stat().st_size for path in files.values())

    def run(self, items: Sequence[RunItem]) -> Outcomes:
        """A record with the lines of each page, for every input."""
        alone, until_s = len(items) == 1, monotonic() + MAX_READING_S

        def record(blob: bytes, params: Params) -> Record:
            in_time = _in_time(pages(blob), until_s, alone=alone)
            return Record(pages=[self._page(page, params) for page in in_time])

        return each(
            items,
            lambda item: Result(
                records=each_blob(item, lambda blob: pack(record(blob, item.params)))
            ),
        )

    def _page(self, image: Image, params: Params) -> Page:
        least = _LEAST_SCORE if params.threshold is None else params.threshold
        # The library reads blue, green, red.
        small = _shrunk(image)
        pixels = np.ascontiguousarray(np.asarray(_stout(small))[:, :, ::-1])
        found = self._read(pixels, turn=False)
        if _certainty(found) < _DOUBTFUL:
            # The graph that says which lines are upside down errs on upright ones now and then.
            found = max(found, self._read(pixels, turn=True), key=_certainty)
        if found.boxes is None:
            return Page(image.width, image.height)
        corners = np.asarray(found.boxes, np.float32).reshape(-1, 4, 2)
        corners *= np.float32(image.width / small.width), np.float32(image.height / small.height)
        upright = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
        lines = [
            TextBox(
                found.txts[i],
                [(float(x), float(y)) for x, y in corners[i]],
                min(1.0, float(found.scores[i])),
            )
            for i in reading_order(upright, lines=True)
            if found.scores[i] >= least
        ]
        return Page(image.width, image.height, lines=lines)

    def _read(self, pixels: Any, *, turn: bool) -> Any:
        """What the library finds; turn: lines that seem to be upside down are turned first."""
        return self._ocr(pixels, use_det=True, use_cls=turn, use_rec=True, text_score=0.0)


def _in_time(images: Iterator[Image], until_s: float, *, alone: bool) -> Iterator[Image]:
    """The pages that can begin in time; an error instead of the first that cannot.

    alone: nothing else in the batch has taken the time.
    """
    for number, image in enumerate(images, 1):
        if monotonic() >= until_s:
            if alone:
                raise InvalidRequest(
                    f"page {number} was not reached within the {MAX_READING_S:.0f} s that the "
                    "inputs may take together; send fewer or emptier pages at a time"
                )
            raise CapacityError("the pages of other requests took all of the batch's time")
        yield image


def _certainty(found: Any) -> float:
    """The mean score of the lines; of a page without any it is 1, for there is no doubt."""
    return 1.0 if found.boxes is None else float(np.mean(found.scores))


def _finite(session: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The graph again; the library would take numbers that are none for a page without text."""

    def checked(pixels: Any) -> Any:
        found = session(pixels)
        if not np.isfinite(found).all():
            raise RunFailed("the network's numbers are not finite")
        return found

    return checked


def _shrunk(image: Image) -> Image:
    """The page itself, or a smaller one where a side is very long."""
    ratio = _LONGEST_SIDE_PX / max(image.size)
    if ratio >= 1:
        return image
    width, height = (max(1, round(side * ratio)) for side in image.size)
    return image.resize((width, height), Resampling.BILINEAR)


def _stout(image: Image) -> Image:
    """The page itself, or with white beside it where it is very slender; nothing moves."""
    least = -(-max(image.size) // _MOST_SLENDER)
    if min(image.size) >= least:
        return image
    wide = new_image("RGB", (max(image.width, least), max(image.height, least)), "white")
    wide.paste(image, (0, 0))
    return wide


def _only(folder: Path, part: str, key: str) -> Path:
    """The one graph of the folder with `part` in its name."""
    found = sorted(folder.glob(f"*[._-]{part}[._-]*.onnx"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ModelUnavailable(f"{key}: one *_{part}_*.onnx is needed in {folder}; found: {names}")
    return found[0]
