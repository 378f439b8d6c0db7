"""Pictures, documents and sounds for tests, made in code, and where the spoken samples lie.

Owns drawing and encoding. Holds no assertions.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator, Sequence
from functools import cache

import av
import numpy as np
from PIL import Image, ImageDraw, ImageFont

TITLE = "Service Agreement"
LEFT = [
    "This agreement is made between",
    "the supplier and the customer",
    "named below on the first of March.",
]
RIGHT = [
    "Either side may end it with notice",
    "of three months to the end of a",
    "quarter, and in writing only.",
]
CELLS = [["Paper", "12", "31.50"], ["Toner", "2", "78.00"]]


def lines_of_page() -> list[str]:
    """The lines of `page`, as people read them: title, columns, then the table by rows."""
    return [TITLE, *LEFT, *RIGHT, *(cell for row in CELLS for cell in row)]


def page(title: str = TITLE, height: int = 640) -> Image.Image:
    """A page with a title, two columns of text and a table with lines around its cells."""
    image = Image.new("RGB", (1_000, height), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(24)
    draw.text((60, 40), title, font=ImageFont.load_default(44), fill="black")
    for x, column in ((60, LEFT), (530, RIGHT)):
        for row, text in enumerate(column):
            draw.text((x, 150 + 40 * row), text, font=font, fill="black")
    for row, cells in enumerate(CELLS):
        top = 380 + 70 * row
        draw.rectangle((60, top, 940, top + 70), outline="black", width=2)
        for x, cell in zip((80, 420, 760), cells, strict=True):
            draw.text((x, top + 20), cell, font=font, fill="black")
    return image


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pdf(images: Sequence[Image.Image]) -> bytes:
    """A PDF with a page for each image, one pixel a point and a half."""
    first, *others = images
    return encoded(first, "PDF", save_all=True, append_images=others, resolution=108.0)


def raw_pdf(*, pages: int = 0, encrypted: bool = False) -> bytes:
    """A PDF written by hand: so many blank pages, or under a password that nobody knows."""
    kids = " ".join(f"{3 + i} 0 R" for i in range(pages))
    objects = ["<< /Type /Catalog /Pages 2 0 R >>"]
    objects.append(f"<< /Type /Pages /Kids [{kids}] /Count {pages} >>")
    objects += ["<< /Type /Page /Parent 2 0 R /MediaBox [0 0 72 72] >>"] * pages
    lock = ""
    if encrypted:
        digest = "00" * 32
        lock = (
            f"/Encrypt << /Filter /Standard /V 1 /R 2 /O <{digest}> /U <{digest}> /P -4 >> "
            "/ID [<00> <00>] "
        )
    body, places = b"%PDF-1.4\n", []
    for number, text in enumerate(objects, start=1):
        places.append(len(body))
        body += f"{number} 0 obj {text} endobj\n".encode()
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    size = len(objects) + 1
    return (
        body
        + (
            f"xref\n0 {size}\n0000000000 65535 f \n{table}"
            f"trailer << /Size {size} /Root 1 0 R {lock}>>\nstartxref\n{len(body)}\n%%EOF\n"
        ).encode()
    )


def wav(samples: np.ndarray, rate_hz: int = 16_000) -> bytes:
    """16-bit WAV of float samples from -1 to 1: [n], or [n, channels]."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        out.setsampwidth(2)
        out.setframerate(rate_hz)
        out.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def silence(seconds: float) -> np.ndarray:
    return np.zeros(int(seconds * 16_000), np.float32)


def recoded(sound: bytes, kind: str, codec: str) -> bytes:
    """The same sound in another container, by another codec."""
    file = io.BytesIO()
    with av.open(io.BytesIO(sound)) as source, av.open(file, "w", format=kind) as target:
        stream = target.add_stream(codec, rate=source.streams.audio[0].rate)
        for frame in _frames(source):
            target.mux(stream.encode(frame))
        target.mux(stream.encode(None))
    return file.getvalue()


def _frames(source: av.container.InputContainer) -> Iterator[av.AudioFrame]:
    fifo = av.AudioFifo()
    for frame in source.decode(audio=0):
        frame.pts = None
        fifo.write(frame)
    while (frame := fifo.read(1152, partial=True)) is not None:
        yield frame


@cache
def spoken(name: str) -> tuple[bytes, str]:
    """An English sample as WAV, and what is said in it."""
    from tests.support.runtime_models import package_path  # which loads torch

    folder = package_path("pytest_audioeval/samples/audio/en")
    return (folder / f"{name}.wav").read_bytes(), (folder / f"{name}.txt").read_text()
