"""How the classes of tokens become entities."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.errors import InvalidRequest
from shoal.runtimes.entities import Tags, find

BIO = ["O", "B-PER", "I-PER", "B-CITY", "I-CITY"]
SURE = 9.0


def window(*tokens, names=BIO):
    """Places and logits of tokens (start, end, class, and more classes as likely)."""
    places = np.array([token[:2] for token in tokens], np.uint32)
    logits = np.zeros((len(tokens), len(names)), np.float32)
    for row, token in enumerate(tokens):
        for name in token[2:]:
            logits[row, names.index(name)] = SURE
    return places, logits


def found(*windows, names=BIO, **kwargs):
    entities = find(list(windows), Tags.read(names), **kwargs)
    return [(entity.label, entity.start, entity.end) for entity in entities]


CLS = (0, 0, "B-PER")  # what a network says of a special token is nothing


def test_bio_tags_begin_and_go_on():
    """B begins anew after a gap, I goes on, I after O begins, another label begins."""
    tokens = [
        CLS,
        (0, 3, "B-PER"),
        (4, 7, "I-PER"),
        (8, 11, "B-PER"),
        (12, 15, "O"),
        (16, 19, "I-CITY"),
        (20, 23, "I-PER"),
        CLS,
    ]
    want = [("PER", 0, 7), ("PER", 8, 11), ("CITY", 16, 19), ("PER", 20, 23)]
    assert found(window(*tokens)) == want


def test_words_that_touch_are_one_entity():
    """An address whose every part is tagged as a beginning comes whole."""
    tokens = [(0, 3, "B-CITY"), (3, 4, "B-CITY"), (4, 8, "B-CITY"), (9, 12, "B-CITY")]
    assert found(window(*tokens)) == [("CITY", 0, 8), ("CITY", 9, 12)]


def test_bilou_tags_end_entities():
    """L and U close an entity, so that its neighbour of the same label is another."""
    names = ["O", "B-X", "I-X", "L-X", "U-X"]
    tokens = [(0, 1, "B-X"), (2, 3, "I-X"), (4, 5, "L-X"), (6, 7, "U-X"), (8, 9, "I-X")]
    assert found(window(*tokens, names=names), names=names) == [
        ("X", 0, 5),
        ("X", 6, 7),
        ("X", 8, 9),
    ]


def test_plain_labels_are_labels():
    """A label that looks like a tag is not cut where no class begins or goes on."""
    names = ["O", "E-MAIL", "S_NAME"]
    tokens = [(0, 4, "E-MAIL"), (5, 9, "E-MAIL"), (10, 12, "S_NAME")]
    assert found(window(*tokens, names=names), names=names) == [
        ("E-MAIL", 0, 9),
        ("S_NAME", 10, 12),
    ]


def test_pieces_of_a_word_share_its_label_and_score():
    """A word goes to the label of its pieces' mean; the score is the mean of what won."""
    places = np.array([[5, 11]] * 3, np.uint32)
    chances = np.array(
        [[0.1, 0.6, 0.1, 0.1, 0.1], [0.6, 0.1, 0.1, 0.1, 0.1], [0.1, 0.1, 0.7, 0.05, 0.05]]
    )
    (entity,) = find([(places, np.log(chances).astype(np.float32))], Tags.read(BIO))
    assert (entity.label, entity.start, entity.end) == ("PER", 5, 11)
    assert entity.score == pytest.approx(chances[:, 1:3].sum(axis=1).mean(), abs=1e-5)


def test_windows_give_each_token_the_view_farther_from_a_cut():
    """Near its cut a window sees what is not there, or half of it; the neighbour's word counts."""
    at = [(10 * i, 10 * i + 5) for i in range(12)]
    first = [(*at[i], "O") for i in range(6)] + [(*at[6], "I-CITY"), (*at[7], "O")]
    second = [(*at[4], "B-CITY"), (*at[5], "O"), (*at[6], "B-PER"), (*at[7], "I-PER")]
    second += [(*at[i], "O") for i in range(8, 12)]
    assert found(window(CLS, *first, CLS), window(CLS, *second, CLS)) == [("PER", 60, 75)]


def test_windows_keep_an_entity_over_a_cut_whole():
    """An entity longer than what two windows share is in neither of them, and found."""
    at = [(10 * i, 10 * i + 5) for i in range(12)]
    tags = ["O", "B-PER", *["I-PER"] * 9, "O"]
    tokens = [(*place, tag) for place, tag in zip(at, tags, strict=True)]
    windows = [window(CLS, *tokens[i : i + 6], CLS) for i in (0, 4, 6)]
    assert found(*windows) == [("PER", 10, 105)]
    assert found(window(CLS, *tokens, CLS)) == [("PER", 10, 105)]


def test_labels_and_threshold_choose():
    """Only wanted labels, only sure ones; a label that is not there is refused with a near one."""
    places, logits = window((0, 3, "B-PER"), (4, 7, "O"), (8, 11, "B-CITY"))
    logits[2] /= SURE  # an entity still, and a doubtful one
    one = (places, logits)
    assert found(one) == [("PER", 0, 3), ("CITY", 8, 11)]
    assert found(one, labels=["CITY"]) == [("CITY", 8, 11)]
    assert found(one, threshold=0.9) == [("PER", 0, 3)]
    with pytest.raises(InvalidRequest, match="did you mean `CITY`") as caught:
        found(one, labels=["CITTY"])
    assert caught.value.param == "labels"


def test_text_without_tokens_has_no_entities():
    """Special tokens alone are no text."""
    assert found(window(CLS, CLS)) == []
