"""Entities on real weights (personal data, 17 kinds) and against the reference library."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.errors import InvalidRequest, ModelUnavailable
from shoal.ipc.messages import RunItem
from shoal.runtimes.registry import create
from shoal.wire.envelope import Inputs, Params
from shoal.wire.records import unpack
from tests.support.lazy import Lazy
from tests.support.prepared import demo
from tests.support.runtime_models import item, run_one, save_tiny, spec, tiny_ids

torch = Lazy("torch")
transformers = Lazy("transformers")

# Label and text of what is in each sentence; all of it is found with certainty.
SENTENCES = {
    "😀 My name is Sarah Johnson and my email is sarah@example.com.": [
        ("GIVEN_NAME", "Sarah"),
        ("SURNAME", "Johnson"),
        ("EMAIL", "sarah@example.com"),
    ],
    "Please call Robert at (415) 555-0132 in the morning.": [
        ("GIVEN_NAME", "Robert"),
        ("PHONE", "(415) 555-0132"),
    ],
    "She lives at 742 Evergreen Terrace, Apt 4B, Springfield.": [
        ("BUILDING_NUMBER", "742"),
        ("STREET_NAME", "Evergreen Terrace"),
        ("SECONDARY_ADDRESS", "Apt 4B"),
        ("CITY", "Springfield"),
    ],
    "Élodie's passport number is X1234567.": [("GIVEN_NAME", "Élodie"), ("PASSPORT", "X1234567")],
    "Mein Name ist Hans Müller.": [("GIVEN_NAME", "Hans"), ("SURNAME", "Müller")],
    "The weather is nice today and nothing happens.": [],
}
# What this network finds only some of the time when other sentences stand around.
UNSURE = {"EMAIL", "SECONDARY_ADDRESS"}
FILLER = (
    "The committee met on a quiet afternoon and discussed the plans for the new garden. "
    "Nobody objected, and the meeting ended early because of the rain. "
)


@pytest.fixture(scope="module")
def rampart(tmp_path_factory):
    return demo("pii-rampart", tmp_path_factory.mktemp("cache"))


def named(text, entities):
    return [(one.label, text[one.start : one.end]) for one in entities]


def test_personal_data_is_found_where_it_stands(rampart):
    """Names, addresses and numbers with offsets in characters, whatever stands before them."""
    found = rampart.entities(*SENTENCES)
    for (text, want), entities in zip(SENTENCES.items(), found, strict=True):
        assert named(text, entities) == want
        assert all(0.5 < one.score <= 1 for one in entities)


def test_long_text_gives_the_entities_of_its_sentences(rampart):
    """Some 2,000 words in windows of 64 tokens: what is planted is found at its place, whole."""
    text, planted = "", []
    order = np.random.default_rng(3).integers(0, len(SENTENCES), 60)
    for pick in order:
        sentence = list(SENTENCES)[pick]
        text += FILLER * 2
        at = len(text)
        (alone,) = rampart.entities(sentence)
        planted += [(one.label, at + one.start, at + one.end) for one in alone]
        text += sentence + " "
    assert len(text.split()) > 2_000
    sent = rampart.item("extract", Inputs(texts=[text]))
    assert len(sent.lengths) > 40
    assert max(sent.lengths) == rampart.entry.max_tokens
    (entities,) = rampart.entities(text)
    found = [(one.label, one.start, one.end) for one in entities]
    assert sorted(found, key=lambda one: one[1]) == found
    assert {one for one in planted if one[0] not in UNSURE} <= set(found)
    assert len(set(found) & set(planted)) / len(set(found) | set(planted)) > 0.7


def test_company_changes_no_entity(rampart):
    """Texts of one request, long and short, are answered each as alone."""
    texts = [*SENTENCES, FILLER * 20, FILLER * 3 + next(iter(SENTENCES))]
    together = rampart.entities(*texts)
    for text, entities in zip(texts, together, strict=True):
        (alone,) = rampart.entities(text)
        assert named(text, alone) == named(text, entities)


def test_labels_and_threshold_reach_the_model(rampart):
    """Only e-mail; a label that it does not have is refused with the nearest that it has."""
    text = next(iter(SENTENCES))
    (only,) = rampart.entities(text, labels=["EMAIL"])
    assert named(text, only) == [("EMAIL", "sarah@example.com")]
    assert rampart.entities(text, threshold=1.0) == [[]]
    with pytest.raises(InvalidRequest, match="did you mean `EMAIL`") as caught:
        rampart.entities(text, labels=["EMIAL"])
    assert caught.value.param == "labels"


TAGS = {"id2label": {0: "O", 1: "B-X", 2: "I-X", 3: "B-Y", 4: "I-Y"}, "num_labels": 5}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(
        transformers.BertForTokenClassification, tmp_path_factory.mktemp("tiny"), **TAGS
    )


def test_checkpoint_gives_the_reference_probabilities(tiny, tmp_path):
    """Every token's best label and its score are what transformers computes, padded or not."""
    runtime = create("onnx", "cpu", 1)
    runtime.load(spec(tiny, tmp_path, tasks=["extract"], extracts=["entities"]))
    reference = transformers.BertForTokenClassification.from_pretrained(tiny).eval()
    sequences = tiny_ids(3, 11, 40)
    # Words far apart, so that each is an entity of its own.
    places = [np.stack([np.arange(n) * 4, np.arange(n) * 4 + 2], 1) for n in (3, 11, 40)]
    offsets = np.concatenate(places).astype("<u4").tobytes()
    result = run_one(runtime, item("i", sequences, "extract", offsets=offsets))
    for ids, record in zip(sequences, result.records, strict=True):
        with torch.inference_mode():
            chances = reference(torch.tensor([ids])).logits[0].softmax(-1).numpy()
        by_label = np.stack([chances[:, 0], chances[:, 1:3].sum(1), chances[:, 3:].sum(1)], 1)
        covered = np.zeros(len(ids), int)
        for entity in unpack(record).entities:
            first, last = entity.start // 4, entity.end // 4
            label = "OXY".index(entity.label)
            covered[first : last + 1] = label
            mean = by_label[first : last + 1, label].mean()
            assert entity.score == pytest.approx(mean, abs=1e-5)
        assert np.array_equal(covered, by_label.argmax(1))


def test_model_without_token_classes_is_refused_at_the_load(tmp_path):
    """A checkpoint that classifies no tokens cannot be loaded for extract."""
    plain = save_tiny(transformers.BertModel, tmp_path / "plain")
    with pytest.raises(ModelUnavailable, match="token classifier"):
        create("onnx", "cpu", 1).load(spec(plain, tmp_path, tasks=["extract"]))


def test_labels_of_the_entry_name_what_no_file_names(tmp_path, tiny):
    """Where a checkpoint says LABEL_0, LABEL_1, ... the entry's labels count, all or none."""
    unnamed = save_tiny(transformers.BertForTokenClassification, tmp_path / "m", num_labels=3)
    runtime = create("onnx", "cpu", 1)
    runtime.load(spec(unnamed, tmp_path, tasks=["extract"], labels=["O", "A", "B"]))
    ids = tiny_ids(20)
    places = np.stack([np.arange(20) * 4, np.arange(20) * 4 + 2], 1).astype("<u4")
    sent: RunItem = item("i", ids, "extract", offsets=places.tobytes(), params=Params())
    found = {one.label for one in unpack(run_one(runtime, sent).records[0]).entities}
    assert found
    assert found <= {"A", "B"}
    with pytest.raises(ModelUnavailable, match="2 labels are named for 3"):
        runtime.load(spec(unnamed, tmp_path, tasks=["extract"], labels=["O", "A"]))
