"""The runtime `whisper`: speech to text by Whisper models that CTranslate2 has converted.

The steps around the network (spectrogram, windows of 30 s, beam search, time marks) are those of
the library `faster-whisper`. Silence is cut out first, for on silence Whisper invents words, and
there is no sampling, so that the same sound gives the same text. Owns the call and the records.
Does not own decoding (`sounds`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from shoal.core.spelling import did_you_mean
from shoal.core.types import Task
from shoal.errors import InvalidRequest, ModelUnavailable
from shoal.ipc.messages import ModelSpec, RunItem, Traits
from shoal.runtimes.holding import HoldingRuntime, Model, Outcomes, each, each_blob
from shoal.runtimes.sounds import RATE_HZ, read_sound
from shoal.wire.envelope import Result
from shoal.wire.records import Record, Segment, pack

ABOUT = {"whisper": "speech to text: Whisper, converted for CTranslate2"}
_CURE = "pip install 'shoal[audio]'"
_FILES = ("model.bin", "config.json", "tokenizer.json")


class WhisperRuntime(HoldingRuntime):
    """Transcribes sounds."""

    name = "whisper"
    needs: ClassVar[dict[str, str]] = {"faster_whisper": _CURE, "ctranslate2": _CURE, "av": _CURE}
    tasks: ClassVar[tuple[Task, ...]] = ("transcribe",)

    def __init__(self, *, device: str, threads: int) -> None:
        traits = Traits(accepts_ids=False, tasks=list(self.tasks))
        super().__init__(traits, device=device, threads=threads)
        self.version = version("faster-whisper")

    def open(self, spec: ModelSpec) -> Model:
        """Opens a converted model; its files must all be there, for none is fetched."""
        folder = Path(spec.path)
        missing = [name for name in _FILES if not (folder / name).is_file()]
        if missing:
            raise ModelUnavailable(f"{spec.key}: {folder} has no {', '.join(missing)}")
        return _Whisper(folder, device=self._device, threads=self._threads)


class _Whisper:
    def __init__(self, folder: Path, *, device: str, threads: int) -> None:
        from faster_whisper import WhisperModel

        logging.getLogger("faster_whisper").setLevel(logging.WARNING)  # two lines for every sound
        kind, _, index = device.partition(":")
        self._model: Any = WhisperModel(
            str(folder),
            device=kind,
            device_index=int(index or 0),
            compute_type="float16" if kind == "cuda" else "float32",
            cpu_threads=threads,
        )
        self._languages: list[str] = self._model.supported_languages
        self.memory_bytes = (folder / "model.bin").stat().st_size

    def run(self, items: Sequence[RunItem]) -> Outcomes:
        """A transcript for every sound."""
        return each(items, self._answer)

    def _answer(self, item: RunItem) -> Result:
        language = item.params.language
        if language is not None and language not in self._languages:
            raise InvalidRequest(
                f"the model does not know the language `{language}`"
                f"{did_you_mean(language, self._languages)}; known: {', '.join(self._languages)}",
                param="language",
            )
        return Result(records=each_blob(item, lambda blob: pack(self._record(blob, language))))

    def _record(self, blob: bytes, language: str | None) -> Record:
        samples = read_sound(blob)
        found, about = self._model.transcribe(
            samples,
            language=language,
            temperature=0.0,
            vad_filter=True,
            # What was heard before the pause may be wrong; it must not lead the rest astray.
            condition_on_previous_text=False,
        )
        segments = [Segment(float(s.start), float(s.end), s.text.strip()) for s in found]
        return Record(
            segments=segments,
            text=" ".join(segment.text for segment in segments if segment.text),
            language=about.language,
            duration_s=len(samples) / RATE_HZ,
        )
