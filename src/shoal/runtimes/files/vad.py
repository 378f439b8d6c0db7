"""Where a sound has speech in it, by Silero's graph over frames of 32 ms.

The graph takes a block of frames, each with the end of the one before, and carries its state from
block to block. Owns the frames, and making stretches of the frames' probabilities: speech begins
where one reaches the threshold and ends where they stay well below. Does not own decoding
(`sounds`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from shoal.errors import ModelUnavailable, RunFailed
from shoal.ipc.messages import ModelSpec, RunItem
from shoal.runtimes.checkpoint import locate
from shoal.runtimes.holding import Outcomes, each, each_blob
from shoal.runtimes.onnx.session import Session
from shoal.runtimes.sounds import RATE_HZ, read_sound
from shoal.wire.envelope import Result
from shoal.wire.records import Record, Segment, pack

Floats = npt.NDArray[np.float32]

USUAL_FILES = ("silero_vad_16k_sequence.onnx", "model.onnx")
_FRAME, _BEFORE = 512, 64  # samples
_BLOCK_FRAMES = 512
_STATE = (1, 1, 128)
_INPUTS = ["input", "h", "c"]
# The graph's makers recommend these.
_THRESHOLD, _HYSTERESIS = 0.5, 0.15
_LEAST_THRESHOLD = 0.01
_LEAST_SPEECH_S, _LEAST_SILENCE_S, _MARGIN_S = 0.25, 0.1, 0.03


class VoiceActivity:
    """The graph over frames."""

    def __init__(self, spec: ModelSpec, *, device: str, threads: int) -> None:
        path = locate(spec, USUAL_FILES)
        self._session = Session(path, {}, device=device, threads=threads, where=spec.key)
        self.memory_bytes = path.stat().st_size
        inputs = [one.name for one in self._session.inputs]
        if inputs != _INPUTS:
            raise ModelUnavailable(f"{spec.key}: the graph takes {inputs}, not {_INPUTS}")

    def run(self, items: Sequence[RunItem]) -> Outcomes:
        """A record with the stretches of speech, for every sound."""
        return each(items, self._answer)

    def _answer(self, item: RunItem) -> Result:
        asked = item.params.threshold
        threshold = _THRESHOLD if asked is None else asked

        def record(blob: bytes) -> Record:
            samples = read_sound(blob)
            duration_s = len(samples) / RATE_HZ
            segments = list(stretches(self._chances(samples), threshold, duration_s))
            return Record(segments=segments, duration_s=duration_s)

        return Result(records=each_blob(item, lambda blob: pack(record(blob))))

    def _chances(self, samples: Floats) -> Floats:
        """The probability of speech in each frame, float32 [frames]."""
        frames = -(-len(samples) // _FRAME)
        whole = np.zeros(_BEFORE + frames * _FRAME, np.float32)
        whole[_BEFORE : _BEFORE + len(samples)] = samples
        windows = np.lib.stride_tricks.sliding_window_view(whole, _BEFORE + _FRAME)[::_FRAME]
        h = c = np.zeros(_STATE, np.float32)
        found = []
        for at in range(0, frames, _BLOCK_FRAMES):
            block = np.ascontiguousarray(windows[at : at + _BLOCK_FRAMES])
            chances, h, c = self._session.run_all({"input": block, "h": h, "c": c})
            found.append(chances.ravel())
        every = np.concatenate(found)
        if not np.isfinite(every).all():
            raise RunFailed("the network's numbers are not finite")
        return every


def stretches(chances: Floats, threshold: float, duration_s: float) -> Iterator[Segment]:
    """Stretches of speech in order, by the probabilities float32 [frames] of a sound.

    threshold: speech begins at a frame that reaches it. duration_s: nothing reaches beyond it.
    """
    frame_s = _FRAME / RATE_HZ
    floor = max(threshold - _HYSTERESIS, _LEAST_THRESHOLD)
    begin_s: float | None = None
    quiet_s: float | None = None  # since when it is quiet within a stretch
    spoken: list[tuple[float, float]] = []
    for frame, chance in enumerate(chances.tolist()):
        now_s = frame * frame_s
        if chance >= threshold:
            begin_s, quiet_s = (now_s if begin_s is None else begin_s), None
        elif begin_s is not None and chance < floor:
            quiet_s = now_s if quiet_s is None else quiet_s
            if now_s - quiet_s >= _LEAST_SILENCE_S:
                spoken.append((begin_s, quiet_s))
                begin_s = quiet_s = None
    if begin_s is not None:
        spoken.append((begin_s, duration_s))
    reached_s = 0.0
    for first_s, last_s in spoken:
        if last_s - first_s < _LEAST_SPEECH_S:
            continue
        end_s = min(duration_s, last_s + _MARGIN_S)
        yield Segment(max(reached_s, first_s - _MARGIN_S), end_s)
        reached_s = end_s
