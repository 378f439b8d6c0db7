"""What a file is, by its first bytes: picture, document or sound, how large, and what it costs.

Owns the most of a file that is read, and reading headers: nothing is decompressed and no library
is used, so that the gateway can refuse and both it and the worker can count before anything is
decoded. Does not own whether the rest of the file is sound: the runtime that decodes it says so.
Every look at a file is bounded.

The cost in tokens, so that files share queues with texts: one for each 1,024 pixels of a picture,
as many as a picture of A4 at 150 dpi for each page of a document, one for each 20 ms of sound.
Where a header does not say, the bytes are asked at the usual rates. Nothing costs more than the
largest file that is read: a header may claim what it likes, and what is larger is refused cheaply.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal

Kind = Literal["image", "pdf", "audio", "unknown"]

# The most of a file that is read. A page takes seconds, and one item is one batch: all of it must
# end within `run_timeout_s`. So must a sound, at about nine seconds of it a second, twice over.
MAX_PIXELS: Final = 50_000_000
MAX_PAGES: Final = 16
MAX_SOUND_S: Final = 600
# JPEG's own limit. What is longer and a few pixels wide takes gigabytes to be made square.
MAX_SIDE_PX: Final = 65_535

PIXELS_PER_TOKEN = 1_024
TOKENS_PER_PAGE = 2_125
TOKENS_PER_S = 50
# A model that reads files of any kind looks at their ends.
TOKENS_PER_FILE = 16
# The usual rates: a photo as JPEG, a scanned page, speech as MP3 or Opus.
_BYTES_PER_PIXEL = 0.25
_BYTES_PER_PAGE = 65_536
_SOUND_BYTES_PER_S = 8_000
# Pictures and sounds have a few parts before the one that says how large they are.
_PARTS_LOOKED_AT = 512

_PDF_PAGE = re.compile(rb"/Type\s*/Page(?![A-Za-z])")
_SOUNDS: tuple[tuple[bytes, str], ...] = (
    (b"ID3", "mp3"),
    (b"OggS", "ogg"),
    (b"\x1aE\xdf\xa3", "webm"),
    (b"#!AMR", "amr"),
)
_PICTURE_BRANDS = {b"avif": "avif", b"avis": "avif", b"heic": "heic", b"heix": "heic"}
_PICTURE_BRANDS |= {b"mif1": "heic", b"msf1": "heic"}


@dataclass(frozen=True, slots=True)
class Media:
    """What the header of a file says; 0 where it does not.

    format: `png`, `jpeg`, `wav`, ...; empty for what is not known. width, height: pixels of an
    image. duration_s: of sound.
    """

    kind: Kind
    format: str
    size_bytes: int
    width: int = 0
    height: int = 0
    duration_s: float = 0.0

    @property
    def pixels(self) -> int:
        """Of an image; 0 where unknown."""
        return self.width * self.height


def cost_tokens(data: bytes, kinds: Sequence[str]) -> int:
    """What a file costs a model whose inputs are of these kinds, as the module says; at least 1.

    A model that takes every `file` looks at both ends of it, and not at what it is.
    """
    media = Media("unknown", "", len(data)) if "file" in kinds else sniff(data)
    if media.kind == "image":
        pixels = media.pixels or media.size_bytes / _BYTES_PER_PIXEL
        return 1 + int(min(pixels, MAX_PIXELS) / PIXELS_PER_TOKEN)
    if media.kind == "pdf":
        return _pages(data) * TOKENS_PER_PAGE
    if media.kind == "audio":
        duration_s = media.duration_s or media.size_bytes / _SOUND_BYTES_PER_S
        return 1 + int(min(duration_s, MAX_SOUND_S) * TOKENS_PER_S)
    return TOKENS_PER_FILE


def _pages(data: bytes) -> int:
    """Of a PDF, counted up to `MAX_PAGES`; guessed where none can be seen from outside.

    This reads the whole file, so only what is asked for its cost is searched for pages.
    """
    seen = sum(1 for _ in islice(_PDF_PAGE.finditer(data), MAX_PAGES))
    # Pages inside compressed objects cannot be seen; then the size is asked.
    return seen or min(MAX_PAGES, 1 + len(data) // _BYTES_PER_PAGE)


def size_fault(width: int, height: int) -> str | None:
    """Why a picture of so many pixels is not read; None where it is."""
    if width * height <= MAX_PIXELS and max(width, height) <= MAX_SIDE_PX:
        return None
    return (
        f"{width} x {height} pixels; at most {MAX_PIXELS} are read, "
        f"and at most {MAX_SIDE_PX} along a side"
    )


def sniff(data: bytes) -> Media:
    """What `data` is. Never raises: what cannot be read is `unknown`, or has no size."""
    try:
        return _image(data) or _document(data) or _sound(data) or Media("unknown", "", len(data))
    except (struct.error, IndexError):  # it ends inside its header
        return Media("unknown", "", len(data))


def _image(data: bytes) -> Media | None:
    width, height = 0, 0
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        name = "png"
        if data[12:16] == b"IHDR":
            width, height = _unpacked(">II", data, 16)
    elif data.startswith(b"\xff\xd8\xff"):
        name = "jpeg"
        width, height = _jpeg_size(data)
    elif data.startswith((b"GIF87a", b"GIF89a")):
        name = "gif"
        width, height = _unpacked("<HH", data, 6)
    elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        name = "webp"
        width, height = _webp_size(data)
    elif data.startswith(b"BM") and len(data) >= 26 and data[6:10] == b"\0\0\0\0":
        name = "bmp"
        width, height = (abs(side) for side in _unpacked("<ii", data, 18))
    elif data.startswith((b"II*\0", b"MM\0*")):
        name = "tiff"
        width, height = _tiff_size(data)
    elif data[4:8] == b"ftyp" and data[8:12] in _PICTURE_BRANDS:
        name = _PICTURE_BRANDS[data[8:12]]
    else:
        return None
    return Media("image", name, len(data), width, height)


def _unpacked(layout: str, data: bytes, at: int) -> tuple[int, int]:
    """Two numbers of a header; zeros where the file ends before them."""
    if len(data) < at + struct.calcsize(layout):
        return 0, 0
    first, second = struct.unpack_from(layout, data, at)
    return first, second


def _jpeg_size(data: bytes) -> tuple[int, int]:
    """Of the first frame header (ITU T.81, B.2.2)."""
    at = 2
    for _ in range(_PARTS_LOOKED_AT):
        if len(data) < at + 4 or data[at] != 0xFF:
            break
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = _unpacked(">HH", data, at + 5)
            return width, height
        elif marker in (0xD9, 0xDA):
            break
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return 0, 0


def _webp_size(data: bytes) -> tuple[int, int]:
    """Of the first chunk: lossy, lossless or extended (RFC 9649)."""
    if len(data) < 30:
        return 0, 0
    if data[12:16] == b"VP8X":
        sides = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        width, height = sides
        return width, height
    if data[12:16] == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = _unpacked("<HH", data, 26)
    return width & 0x3FFF, height & 0x3FFF


def _tiff_size(data: bytes) -> tuple[int, int]:
    """Of the first directory: tags 256 and 257, 16 or 32 bits wide (TIFF 6.0)."""
    order: Literal["little", "big"] = "little" if data.startswith(b"II") else "big"
    at = int.from_bytes(data[4:8], order)
    sides = {256: 0, 257: 0}
    for entry in range(min(int.from_bytes(data[at : at + 2], order), _PARTS_LOOKED_AT)):
        field = data[at + 2 + 12 * entry : at + 14 + 12 * entry]
        tag, kind = int.from_bytes(field[:2], order), int.from_bytes(field[2:4], order)
        if tag in sides:
            sides[tag] = int.from_bytes(field[8 : 10 if kind == 3 else 12], order)
    return sides[256], sides[257]


def _document(data: bytes) -> Media | None:
    if b"%PDF-" not in data[:1024]:  # readers take some noise before it
        return None
    return Media("pdf", "pdf", len(data))


def _sound(data: bytes) -> Media | None:
    if data.startswith((b"RIFF", b"RF64")) and data[8:12] == b"WAVE":
        return Media("audio", "wav", len(data), duration_s=_wav_duration_s(data))
    if data.startswith(b"fLaC"):
        return Media("audio", "flac", len(data), duration_s=_flac_duration_s(data))
    if data.startswith(b"FORM") and data[8:12] in (b"AIFF", b"AIFC"):
        return Media("audio", "aiff", len(data))
    if data[4:8] == b"ftyp":
        return Media("audio", "m4a", len(data))
    name = next((name for magic, name in _SOUNDS if data.startswith(magic)), "")
    if len(data) >= 4 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:
        layer = data[1] >> 1 & 3  # 0 in AAC's frames, which begin like those of MPEG audio
        name = "mp3" if layer else "aac"
    return Media("audio", name, len(data)) if name else None


def _wav_duration_s(data: bytes) -> float:
    """Of the `data` chunk at the byte rate of the `fmt ` chunk, as far as the file reaches."""
    at, bytes_per_s = 12, 0
    for _ in range(_PARTS_LOOKED_AT):
        if len(data) < at + 8:
            break
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if name == b"fmt ":
            bytes_per_s = int.from_bytes(data[at + 16 : at + 20], "little")
        elif name == b"data":
            return min(size, len(data) - at - 8) / bytes_per_s if bytes_per_s else 0.0
        at += 8 + size + size % 2
    return 0.0


def _flac_duration_s(data: bytes) -> float:
    """Samples over their rate, from the first metadata block (RFC 9639, 8.2)."""
    if len(data) < 26 or data[4] & 0x7F != 0:
        return 0.0
    packed = int.from_bytes(data[18:26], "big")
    rate, samples = packed >> 44, packed & 0xFFFFFFFFF
    return samples / rate if rate else 0.0
