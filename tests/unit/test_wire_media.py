"""Headers of files: kinds, sizes, costs; nothing of them is trusted."""

from __future__ import annotations

import io
import wave

import hypothesis.strategies as st
import pytest
from hypothesis import given
from PIL import Image

from shoal.wire.media import (
    MAX_PAGES,
    MAX_PIXELS,
    MAX_SOUND_S,
    PIXELS_PER_TOKEN,
    TOKENS_PER_FILE,
    TOKENS_PER_PAGE,
    TOKENS_PER_S,
    cost_tokens,
    sniff,
)

FORMATS = ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"]


def picture(form, width=321, height=123, **options):
    file = io.BytesIO()
    Image.new("RGB", (width, height), "teal").save(file, form, **options)
    return file.getvalue()


def sound(seconds, rate=16_000):
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(b"\0\0" * int(seconds * rate))
    return file.getvalue()


@pytest.mark.parametrize("form", FORMATS)
def test_media_size_of_an_image_is_that_of_its_encoder(form):
    """Width and height are read as the library that wrote the file meant them."""
    data = picture(form)
    found = sniff(data)
    assert (found.kind, found.format) == ("image", form.lower())
    assert (found.width, found.height) == (321, 123)
    assert cost_tokens(data, ["image"]) == 1 + 321 * 123 // PIXELS_PER_TOKEN


@pytest.mark.parametrize("options", [{"lossless": True}, {"quality": 50}, {"exif": b"Exif\0\0"}])
def test_media_reads_all_three_kinds_of_webp(options):
    """Lossless, lossy and extended WebP say their size at different places."""
    found = sniff(picture("WEBP", **options))
    assert (found.width, found.height) == (321, 123)


def test_media_jpeg_size_stands_behind_other_segments():
    """A progressive picture with a comment before its frame header has its size."""
    data = picture("JPEG", progressive=True, comment=b"x" * 60_000)
    assert (sniff(data).width, sniff(data).height) == (321, 123)


def test_media_duration_of_wav_is_what_is_there():
    """The seconds of a recording; of a cut one as many as are left, whatever the header says."""
    whole = sound(2.0)
    assert (sniff(whole).kind, sniff(whole).duration_s) == ("audio", 2.0)
    assert cost_tokens(whole, ["audio"]) == 1 + 2 * TOKENS_PER_S
    assert 0.9 < sniff(whole[: len(whole) // 2]).duration_s <= 1.0


def test_media_pages_of_a_document_are_counted():
    """A PDF costs by its pages, and an empty one as much as a page."""
    file = io.BytesIO()
    pages = [Image.new("RGB", (60, 60)) for _ in range(3)]
    pages[0].save(file, "PDF", save_all=True, append_images=pages[1:])
    assert sniff(file.getvalue()).kind == "pdf"
    assert cost_tokens(file.getvalue(), ["document"]) == 3 * TOKENS_PER_PAGE
    assert cost_tokens(b"%PDF-1.7\n", ["document"]) == TOKENS_PER_PAGE


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"fLaC\x00\x00\x00\x22" + b"\0" * 10 + b"\x03\xe8\x02\xf0\x00\x00\x3e\x80", "flac"),
        (b"ID3\x04", "mp3"),
        (b"\xff\xfb\x90\x00", "mp3"),
        (b"\xff\xf1\x50\x80", "aac"),
        (b"OggS\0", "ogg"),
        (b"\0\0\0\x20ftypM4A ", "m4a"),
        (b"\x1aE\xdf\xa3", "webm"),
        (b"FORM\0\0\0\0AIFF", "aiff"),
    ],
)
def test_media_knows_sounds_by_their_first_bytes(data, name):
    """Each kind of sound is known; where its length is not, its bytes stand for it."""
    found = sniff(data)
    assert (found.kind, found.format) == ("audio", name)
    assert found.duration_s == (1.0 if name == "flac" else 0.0)
    assert cost_tokens(data, ["audio"]) >= 1


@pytest.mark.parametrize("data", [b"", b"hello", b"RIFF", b"BM", b"\0" * 100])
def test_media_unknown_is_unknown(data):
    """What is none of these is a file like any other."""
    assert (sniff(data).kind, cost_tokens(data, ["image"])) == ("unknown", TOKENS_PER_FILE)


def test_media_cost_is_of_what_a_model_reads():
    """A page costs a reader of documents what it is, and one of any files only a look."""
    document = b"%PDF-1.7\n/Type /Page\n/Type /Page\n"
    assert cost_tokens(document, ["document"]) == 2 * TOKENS_PER_PAGE
    assert cost_tokens(document, ["file"]) == TOKENS_PER_FILE


@pytest.mark.parametrize(
    ("data", "most"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"\xff" * 8, 1 + MAX_PIXELS // PIXELS_PER_TOKEN),
        (b"%PDF-1.7\n" + b"/Type/Page " * 100_000, MAX_PAGES * TOKENS_PER_PAGE),
        (b"%PDF-1.7\n" + bytes(10_000_000), MAX_PAGES * TOKENS_PER_PAGE),
        # A second holds one sample, and there are 2^36 - 1 of them.
        (b"fLaC\0\0\0\x22" + bytes(10) + b"\0\0\x10\x0f" + b"\xff" * 4 + bytes(16), None),
        (b"ID3\x04" + bytes(10_000_000), None),
    ],
    ids=["png", "pdf", "pdf-guessed", "flac", "mp3-guessed"],
)
def test_media_cost_is_at_most_that_of_the_largest_file_that_is_read(data, most):
    """Whatever a header claims, a file costs no more than one that is just not refused."""
    most = 1 + MAX_SOUND_S * TOKENS_PER_S if most is None else most
    assert cost_tokens(data, ["image", "document", "audio"]) == most


@given(st.sampled_from(FORMATS), st.data())
def test_media_of_a_damaged_file_never_raises(form, data):
    """A header that is cut or overwritten gives a Media with numbers that are no less than 0."""
    whole = bytearray(picture(form, 5, 7))
    for _ in range(data.draw(st.integers(0, 8))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    file = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    found = sniff(file)
    assert min(found.width, found.height) >= 0
    assert 1 <= cost_tokens(file, ["image"]) <= 1 + MAX_PIXELS // PIXELS_PER_TOKEN
