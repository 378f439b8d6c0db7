"""Reading pictures, documents and sounds: what is read and what is refused, up to which limits."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shoal.errors import InvalidRequest, RuntimeUnavailable
from shoal.runtimes.documents import pages
from shoal.runtimes.files.order import reading_order
from shoal.runtimes.files.vad import stretches
from shoal.runtimes.holding import demand
from shoal.runtimes.images import PREPARATIONS, prepared, read_image
from shoal.runtimes.labels import wanted
from shoal.runtimes.sounds import RATE_HZ, read_sound
from shoal.wire.media import MAX_PAGES, MAX_PIXELS, MAX_SIDE_PX, MAX_SOUND_S
from tests.support.files import encoded, pdf, raw_pdf, recoded, silence, wav

SMALL = Image.new("RGB", (40, 30), (250, 120, 10))
TONE = np.sin(np.arange(8_000) / 8_000 * 2 * np.pi * 440).astype(np.float32) / 2


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_image_of_a_usual_format_is_read(kind):
    """Size and colours come back, up to what the format loses."""
    image = read_image(encoded(SMALL, kind))
    assert (image.mode, image.size) == ("RGB", SMALL.size)
    assert np.allclose(np.asarray(image), np.asarray(SMALL), atol=12)


def test_image_comes_upright_and_on_white():
    """The camera's orientation is applied; what is clear is white; 16-bit grey keeps its range."""
    marked = SMALL.copy()
    marked.paste((0, 0, 0), (0, 0, 5, 5))
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn
    upright = read_image(encoded(marked, "PNG", exif=turned))
    assert upright.size == SMALL.size[::-1]
    assert upright.getpixel((upright.width - 1, 0)) == (0, 0, 0)
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    assert read_image(encoded(clear, "PNG")).getpixel((0, 0)) == (255, 255, 255)
    grey = Image.fromarray(np.full((4, 4), 257 * 100, np.uint16))
    assert read_image(encoded(grey, "PNG")).getpixel((0, 0)) == (100, 100, 100)


def test_image_over_the_limit_is_refused_before_it_is_decompressed():
    """More than MAX_PIXELS is refused, also far more than Pillow itself would warn of."""
    for side in (8_000, 25_000):
        assert side * side > MAX_PIXELS
        with pytest.raises(InvalidRequest, match="pixels"):
            read_image(claiming(side))


@pytest.mark.parametrize("size", [(1, MAX_SIDE_PX + 1), (MAX_SIDE_PX + 1, 1)])
def test_image_with_a_side_over_the_limit_is_refused(size):
    """Few pixels as they are: made square for a network they would take gigabytes."""
    assert read_image(encoded(Image.new("1", (MAX_SIDE_PX, 1)), "PNG")).width == MAX_SIDE_PX
    with pytest.raises(InvalidRequest, match=f"at most {MAX_SIDE_PX} along a side"):
        read_image(encoded(Image.new("1", size), "PNG"))


def claiming(side: int) -> bytes:
    """A PNG whose header claims so many pixels a side."""
    small = bytearray(encoded(Image.new("1", (1, 1)), "PNG"))
    small[16:24] = side.to_bytes(4, "big") * 2
    small[29:33] = zlib.crc32(bytes(small[12:29])).to_bytes(4, "big")
    return bytes(small)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_image_with_damaged_bytes_is_read_or_refused(data):
    """Whatever bytes are changed or missing, it is a picture or the caller's fault, never more."""
    kind = data.draw(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]))
    blob = bytearray(encoded(SMALL, kind))
    for _ in range(data.draw(st.integers(0, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    try:
        image = read_image(bytes(blob[: data.draw(st.integers(0, len(blob)))]))
    except InvalidRequest:
        return
    assert image.mode == "RGB"


def test_image_is_prepared_as_the_networks_expect():
    """A square cut from the middle, in the order and on the scale of each preparation."""
    wide = Image.new("RGB", (300, 100), (200, 0, 0))
    wide.paste((10, 20, 30), (80, 0, 220, 100))
    caffe = PREPARATIONS["caffe"]
    middle = prepared(wide, 224, PREPARATIONS["unit"])
    assert middle.shape == (224, 224, 3)
    assert np.allclose(middle, np.array([10, 20, 30]) / 255, atol=1e-6)
    blue_first = prepared(SMALL, 224, caffe)[0, 0]
    assert blue_first == pytest.approx(np.array([10, 120, 250]) - np.array(caffe.mean))


def test_document_gives_its_pages_in_order():
    """A PDF is drawn page by page at the documented fineness; an image is one page."""
    colours = ["red", "lime", "blue"]
    found = list(pages(pdf([Image.new("RGB", (108, 54), colour) for colour in colours])))
    assert [page.size for page in found] == [(150, 75)] * 3
    assert [page.getpixel((50, 30)) for page in found] == [
        pytest.approx(Image.new("RGB", (1, 1), colour).getpixel((0, 0)), abs=8)
        for colour in colours
    ]
    assert [page.size for page in pages(encoded(SMALL, "PNG"))] == [SMALL.size]


@pytest.mark.parametrize(
    ("blob", "said"),
    [
        (b"", "zero bytes"),
        (b"%PDF-1.4\nand no more", "the PDF is broken"),
        (raw_pdf(), "broken|no page"),
        (raw_pdf(pages=1, encrypted=True), "encrypted"),
        (raw_pdf(pages=MAX_PAGES + 1), f"at most {MAX_PAGES} are read"),
        (b"plain text is no picture", "no image of a known format"),
        (encoded(SMALL, "PNG")[:-30], "the image is broken"),
    ],
)
def test_document_that_cannot_be_read_is_refused(blob, said):
    """Each fault is the caller's, and is named."""
    with pytest.raises(InvalidRequest, match=said):
        list(pages(blob))


def test_document_fault_is_its_own_and_not_that_of_the_one_before():
    """A PDF without a page that comes after an encrypted one is not called encrypted."""
    for blob, said in ((raw_pdf(pages=1, encrypted=True), "encrypted"), (raw_pdf(), "broken|no p")):
        with pytest.raises(InvalidRequest, match=said):
            list(pages(blob))


def test_document_with_as_many_pages_as_are_read_is_read():
    """The limit itself is within the limit."""
    assert sum(1 for _ in pages(raw_pdf(pages=MAX_PAGES))) == MAX_PAGES


@pytest.mark.parametrize(
    ("kind", "codec"),
    [("flac", "flac"), ("mp3", "libmp3lame"), ("ogg", "libopus"), ("ipod", "aac"), ("aiff", "")],
)
def test_sound_of_a_usual_format_is_read(kind, codec):
    """A second of a tone comes back as a second at 16 kHz with the tone in it."""
    source = wav(np.tile(TONE, 6), 48_000)
    blob = recoded(source, kind, codec or "pcm_s16be")
    samples = read_sound(blob)
    assert len(samples) == pytest.approx(RATE_HZ, rel=0.08)
    loudest = np.abs(np.fft.rfft(samples[:RATE_HZ])).argmax() * RATE_HZ / min(len(samples), RATE_HZ)
    assert loudest == pytest.approx(440 * 6, rel=0.02)


def test_sound_is_mixed_to_one_channel_and_resampled():
    """Two channels of opposite sign cancel; 8 kHz becomes twice as many samples."""
    both = np.stack([TONE, -TONE], axis=1)
    assert np.abs(read_sound(wav(both))).max() < 1e-3
    assert len(read_sound(wav(TONE, 8_000))) == pytest.approx(2 * len(TONE), rel=0.02)


def test_sound_that_ends_too_soon_is_read_as_far_as_it_goes():
    """Half of a file gives half of its sound."""
    whole = wav(TONE)
    assert len(read_sound(whole[: len(whole) // 2])) == pytest.approx(len(TONE) / 2, rel=0.02)


@pytest.mark.parametrize(("kind", "codec"), [("mp3", "libmp3lame"), ("adts", "aac")])
def test_sound_is_read_on_after_a_damaged_part(kind, codec):
    """Only what was in the damaged packets is missing; noise may claim to be a long one."""
    hiss = np.random.default_rng(1).normal(0, 0.02, 6 * len(TONE)).astype(np.float32)
    blob = recoded(wav(np.tile(TONE, 6) + hiss), kind, codec)
    whole = len(read_sound(blob))
    at = len(blob) // 4
    for seed in range(4):
        noise = np.random.default_rng(seed).bytes(800)
        damaged = blob[:at] + noise + blob[at + len(noise) :]
        assert whole * 0.6 < len(read_sound(damaged)) <= whole


@pytest.mark.parametrize(
    ("blob", "said"),
    [
        (b"", "zero bytes"),
        (b"#EXTM3U\nfile:///etc/hostname\n", "no audio of a known format"),
        (wav(TONE)[:44], "no sound"),
        (b"fLaC" + bytes(200), "broken|no sound"),
        (wav(silence(1), 1)[:44] + bytes(2 * (MAX_SOUND_S + 1)), f"longer than the {MAX_SOUND_S}"),
    ],
)
def test_sound_that_cannot_be_read_is_refused(blob, said):
    """Each fault is the caller's; a play list is never followed."""
    with pytest.raises(InvalidRequest, match=said):
        read_sound(blob)


def box(left, top, width=200, height=20):
    return (left, top, left + width, top + height)


def test_reading_order_reads_columns_of_prose_and_rows_of_tables():
    """A title, then two columns one after the other, then a table row by row."""
    wanted_order = [
        box(0, 0, 500, 40),
        *(box(0, top) for top in (100, 130, 160)),
        *(box(300, top) for top in (101, 129, 161)),
        *(box(left, top, 60) for top in (300, 330) for left in (0, 200, 400)),
    ]
    shuffled = np.random.default_rng(7).permutation(len(wanted_order))
    boxes = np.array(wanted_order, np.float32)[shuffled]
    assert boxes[reading_order(boxes, lines=True)].tolist() == [list(b) for b in wanted_order]
    regions = np.array([box(0, 0, 90, 400), box(100, 0, 90, 100), box(100, 110, 90, 90)])
    assert reading_order(regions[::-1].astype(np.float32), lines=False) == [2, 1, 0]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 50)] * 4), max_size=20))
def test_reading_order_keeps_every_box_once(places):
    """Whatever lies where: a permutation."""
    boxes = np.array([box(x, y, w, h) for x, y, w, h in places], np.float32).reshape(-1, 4)
    for lines in (True, False):
        assert sorted(reading_order(boxes, lines=lines)) == list(range(len(boxes)))


def test_speech_is_cut_by_threshold_with_patience():
    """A short dip does not end a stretch, a click begins none, and nothing leaves the sound."""
    chances = np.zeros(100, np.float32)
    chances[20:40] = 0.9
    chances[30:32] = 0.1  # 64 ms
    chances[60] = 0.9
    chances[80:] = 0.9
    first, last = stretches(chances, 0.5, 3.1)
    assert (first.start_s, first.end_s) == pytest.approx((0.61, 1.31))
    assert (last.start_s, last.end_s) == pytest.approx((2.53, 3.1))
    assert list(stretches(np.zeros(0, np.float32), 0.5, 0.0)) == []


def test_labels_that_a_model_lacks_are_refused_with_near_names():
    """None asked for means all; an unknown one names the field and the near ones."""
    assert wanted(["title", "table"], []) == {"title", "table"}
    with pytest.raises(InvalidRequest, match="table") as caught:
        wanted(["title", "table"], ["tabel"])
    assert caught.value.param == "labels"


def test_library_that_is_missing_is_named_with_its_cure():
    """What cannot be imported says what installs it."""
    demand("m@1", {"json": "unused"})
    with pytest.raises(RuntimeUnavailable, match=r"m@1: no_such_library .* pip install it"):
        demand("m@1", {"no_such_library": "pip install it"})
