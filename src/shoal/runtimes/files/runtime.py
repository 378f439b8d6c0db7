"""The runtime `files`: models whose inputs are pictures, documents, sounds or any files.

One process serves all families of `families`; each is a small class beside this one, and its
libraries are imported when a model of it is loaded. The options of a model stand in its family's
module. Owns the choice of the family. Does not own decoding (`images`, `documents`, `sounds`).
"""

from __future__ import annotations

from importlib.metadata import version
from typing import ClassVar, Protocol

from shoal.core.spelling import did_you_mean
from shoal.core.types import Task
from shoal.errors import ModelUnavailable
from shoal.ipc.messages import ModelSpec, Traits
from shoal.runtimes.files.families import ABOUT
from shoal.runtimes.holding import HoldingRuntime, Model, demand

_VISION = "pip install 'shoal[vision]'"
_AUDIO = "pip install 'shoal[audio]'"
_PICTURES = {"PIL": _VISION}
_PAGES = {**_PICTURES, "pypdfium2": _VISION}
NEEDS: dict[str, dict[str, str]] = {
    "ocr": {**_PAGES, "rapidocr": _VISION, "cv2": _VISION},
    "layout": _PAGES,
    "image_classifier": _PICTURES,
    "file_type": {},
    "vad": {"av": _AUDIO},
}


class FilesRuntime(HoldingRuntime):
    """Runs graphs over files through ONNX Runtime."""

    name = "files"
    needs: ClassVar[dict[str, str]] = {"onnxruntime": "pip install onnxruntime"}
    tasks: ClassVar[tuple[Task, ...]] = ("classify", "extract")

    def __init__(self, *, device: str, threads: int) -> None:
        from shoal.runtimes.onnx.session import providers

        providers(device)  # a missing device is known now, not at the first load
        traits = Traits(accepts_ids=False, tasks=list(self.tasks))
        super().__init__(traits, device=device, threads=threads)
        self.version = version("onnxruntime")

    def open(self, spec: ModelSpec) -> Model:
        """Opens a model of any family; the spec must name which."""
        family = spec.family or ""
        if family not in NEEDS:
            known = ", ".join(ABOUT)
            raise ModelUnavailable(
                f"{spec.key}: the runtime `files` has no family `{family}`"
                f"{did_you_mean(family, ABOUT)}; known: {known}"
            )
        demand(f"{spec.key}: family `{family}`", NEEDS[family])
        return _opener(family)(spec, device=self._device, threads=self._threads)


class _Opener(Protocol):
    def __call__(self, spec: ModelSpec, *, device: str, threads: int) -> Model: ...


def _opener(family: str) -> _Opener:
    """The class of a family; importing it imports the family's libraries."""
    if family == "ocr":
        from shoal.runtimes.files.ocr import Ocr

        return Ocr
    if family == "layout":
        from shoal.runtimes.files.layout import Layout

        return Layout
    if family == "image_classifier":
        from shoal.runtimes.files.image_classifier import ImageClassifier

        return ImageClassifier
    if family == "file_type":
        from shoal.runtimes.files.file_type import FileType

        return FileType
    from shoal.runtimes.files.vad import VoiceActivity

    return VoiceActivity
