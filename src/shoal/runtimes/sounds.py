"""Sound as samples: reading files of the usual formats within limits.

Owns which formats are read and turning them into one channel at 16 kHz. Uses PyAV, which brings
FFmpeg's readers with it and is imported when a sound is read, not before. Does not own what is
heard.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import InvalidRequest
from shoal.wire.media import MAX_SOUND_S, sniff

Floats = npt.NDArray[np.float32]

RATE_HZ = 16_000
# A reader is named, never guessed: some of FFmpeg's are play lists that open other files.
_READERS = {
    "wav": "wav",
    "flac": "flac",
    "mp3": "mp3",
    "ogg": "ogg",
    "webm": "matroska",
    "m4a": "mov",
    "aac": "aac",
    "aiff": "aiff",
}
_FULL_SCALE = np.float32(32_768)


def read_sound(blob: bytes) -> Floats:
    """The samples of a file, float32 [n] from -1 to 1, at 16 kHz, its channels mixed to one.

    A file that ends too soon is read as far as it goes. Raises `InvalidRequest` for bytes of no
    known format, without any sound, or with more than `MAX_SOUND_S` seconds of it.
    """
    if not blob:
        raise InvalidRequest("the audio is empty: zero bytes")
    reader = _READERS.get(sniff(blob).format)
    if reader is None:
        known = ", ".join(_READERS)
        raise InvalidRequest(f"the bytes are no audio of a known format ({known})")
    import av

    try:
        parts = list(_bounded(_mono(io.BytesIO(blob), reader)))
    except (av.error.FFmpegError, ValueError, IndexError) as error:
        raise InvalidRequest(f"the audio is broken: {error}") from error
    if not parts:
        raise InvalidRequest("no sound could be read from the audio")
    return np.concatenate(parts).astype(np.float32) / _FULL_SCALE


def _bounded(parts: Iterator[npt.NDArray[np.int16]]) -> Iterator[npt.NDArray[np.int16]]:
    samples = 0
    for part in parts:
        samples += len(part)
        if samples > MAX_SOUND_S * RATE_HZ:
            raise InvalidRequest(
                f"the audio is longer than the {MAX_SOUND_S} s that are read; send it in parts"
            )
        yield part


def _mono(file: io.BytesIO, reader: str) -> Iterator[npt.NDArray[np.int16]]:
    """Its first stream of sound, resampled, piece by piece."""
    import av

    resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE_HZ)
    with av.open(file, format=reader, metadata_errors="ignore") as container:
        if not container.streams.audio:
            raise InvalidRequest("the file has no sound in it")
        for frame in _readable(container):
            frame.pts = None  # gaps and jumps of the clock are not samples
            for piece in resampler.resample(frame):
                yield piece.to_ndarray().reshape(-1).astype(np.int16)
        for piece in resampler.resample(None):
            yield piece.to_ndarray().reshape(-1).astype(np.int16)


def _readable(container: Any) -> Iterator[Any]:
    """The frames that can be decoded; packets with damaged ones are passed over."""
    import av

    packets = container.demux(audio=0)
    while True:
        try:
            packet = next(packets, None)
        except av.error.InvalidDataError:  # the file ends in the middle of one
            return
        if packet is None:
            return
        try:
            yield from packet.decode()
        except av.error.FFmpegError:  # damage can look like any wish that a decoder cannot fulfil
            continue
