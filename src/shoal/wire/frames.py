"""Frames on a byte stream: a little-endian u32 length, then that many bytes.

Owns the incremental decoder and the bound of a frame. Sans-io: bytes in, frames out. Does not own
what a frame means (`shoal.ipc.messages`).
"""

from __future__ import annotations

HEADER_BYTES = 4
MAX_FRAME_BYTES = 256 * 1024 * 1024


class FrameTooLarge(ValueError):
    """A frame over the bound: the stream cannot be read any further."""


def frame(data: bytes, max_frame_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """`data` with its header before it."""
    if len(data) > max_frame_bytes:
        raise FrameTooLarge(f"a frame of {len(data)} bytes, at most {max_frame_bytes} are allowed")
    return len(data).to_bytes(HEADER_BYTES, "little") + data


class FrameDecoder:
    """Cuts a stream into frames, whatever the pieces it arrives in.

    Holds at most one unfinished frame, so its memory is bounded by `max_frame_bytes`.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """The frames that `data` completes, in order. Raises `FrameTooLarge`."""
        buffer = self._buffer
        buffer += data
        frames: list[bytes] = []
        at = 0
        while len(buffer) - at >= HEADER_BYTES:
            size = int.from_bytes(buffer[at : at + HEADER_BYTES], "little")
            if size > self._max_frame_bytes:
                raise FrameTooLarge(
                    f"a frame of {size} bytes, at most {self._max_frame_bytes} are allowed"
                )
            end = at + HEADER_BYTES + size
            if len(buffer) < end:
                break
            frames.append(bytes(buffer[at + HEADER_BYTES : end]))
            at = end
        if at:
            del buffer[:at]
        return frames

    @property
    def pending_bytes(self) -> int:
        """Bytes of the frame that is not complete yet."""
        return len(self._buffer)
