"""Pairs to train on: the forms of the file, its faults by line, the split, and the measures."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from shoal.errors import OperatorError
from shoal.train import pairs as rules
from shoal.train.loop import others_that_are_right
from shoal.train.measures import measure
from shoal.train.pairs import Pair, read, same, split

HEADER = "anchor,positive,negative\n"


def written(folder, name, data):
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def row(anchor, positive, negative=()):
    return json.dumps({"anchor": anchor, "positive": positive, "negative": negative}) + "\n"


def test_pairs_are_the_same_in_each_form(tmp_path):
    """JSON lines, CSV and TSV give the same texts, with quotes, line ends, a mark and negatives."""
    lines = row('a "q"', "b, c", ["d", "e"]) + "\n" + row("f", "g\nh", "i")
    table = 'anchor,positive,negative,negative\n"a ""q""","b, c",d,e\n\nf,"g\nh",i,\n'
    forms = [
        written(tmp_path, "p.jsonl", lines),
        written(tmp_path, "p.csv", b"\xef\xbb\xbf" + table.replace("\n\nf", "\r\n\r\nf").encode()),
        written(
            tmp_path, "p.tsv", table.replace('"b, c"', "b; c").replace(",", "\t").replace(";", ",")
        ),
    ]
    texts = [[pair.texts for pair in read(path)] for path in forms]
    assert texts[0] == [('a "q"', "b, c", "d", "e"), ("f", "g\nh", "i")]
    assert texts[1] == texts[0]
    assert texts[2] == texts[0]
    assert [pair.line for pair in read(forms[0])] == [1, 3]
    assert [pair.line for pair in read(forms[1])] == [2, 4]


FAULTS = {
    "empty text": ("p.jsonl", row("a", "b") + row("a", " \t"), 2, "`positive` is empty"),
    "empty negative": ("p.jsonl", row("a", "b", ["c", ""]), 1, "`negative` is empty"),
    "one column": ("p.csv", "text\na\n", 1, "must name the columns"),
    "a column missing": ("p.csv", HEADER + "a,b,c\nd\n", 3, "has 1 columns, the first line 3"),
    "a column unknown": ("p.csv", "anchor,positive,label\n", 1, "`label`"),
    "no header": ("p.tsv", "a text\tanother\n", 1, "must name the columns"),
    "not UTF-8": ("p.csv", HEADER.encode() + b"a,b,c\nd\xff,e,f\n", 3, "is not UTF-8"),
    "no JSON": ("p.jsonl", row("a", "b") + "{,\n", 2, "is no object"),
    "no object": ("p.jsonl", "[1]\n", 1, "is no object"),
    "deep nesting": ("p.jsonl", "[" * 100_000 + "\n", 1, "is no object"),
    "a number": ("p.jsonl", '{"anchor": 1, "positive": "b"}\n', 1, "Expected `str`"),
    "another key": ("p.jsonl", '{"anchor": "a", "text": "b"}\n', 1, "text"),
    "the same pair": ("p.jsonl", row("a", "b") + "\n" + row("a", "b"), 3, "same pair as on line 1"),
    "a wrong quote": ("p.csv", HEADER + 'a,"b"c,d\n', 2, "is no row"),
    "an open quote": ("p.csv", HEADER + 'a,b,c\n"a,b,c\nd,e\n', 3, "is no row"),
    "its own negative": ("p.jsonl", row("a", "B c", "b  C"), 1, "`negative` is its `positive`"),
    "very long": ("p.jsonl", row("a", "b" * (rules.MAX_TEXT_CHARS + 1)), 1, "characters"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_pairs_at_fault_are_named_by_line(tmp_path, name):
    """Each fault is said with file and line."""
    file, data, line, what = FAULTS[name]
    path = written(tmp_path, file, data)
    with pytest.raises(OperatorError) as caught:
        read(path)
    assert caught.value.message.startswith(f"{path}:{line}: ")
    assert what in caught.value.message


def test_pairs_tell_of_many_faults_at_once(tmp_path):
    """The first are shown, the others counted; a text at the limit is none."""
    long = row("a", "b" * rules.MAX_TEXT_CHARS)
    path = written(tmp_path, "p.jsonl", long + "".join(row(str(n), "") for n in range(30)))
    with pytest.raises(OperatorError, match="and 20 faults more") as caught:
        read(path)
    assert f"{path}:2: " in caught.value.message
    assert f"{path}:1: " not in caught.value.message


def test_pairs_file_is_bounded(tmp_path):
    """A file that is too large, has too many pairs, another name, or is not there, is refused."""
    large = tmp_path / "large.csv"
    with large.open("wb") as file:
        file.truncate(rules.MAX_FILE_BYTES + 1)
    with pytest.raises(OperatorError, match="larger than"):
        read(large)
    for path in (tmp_path / "none.csv", written(tmp_path, "p.txt", "a")):
        with pytest.raises(OperatorError, match=r"cannot be read|must end in"):
            read(path)


@pytest.mark.slow
def test_pairs_are_bounded_in_number(tmp_path):
    """The line of the first pair over the limit is named."""
    rows = "".join(f"{n},p{n}\n" for n in range(rules.MAX_PAIRS))
    path = written(tmp_path, "p.csv", "anchor,positive\n" + rows + "one,more\nand,another\n")
    with pytest.raises(OperatorError, match=f"{rules.MAX_PAIRS + 2}: more than"):
        read(path)


def drawn(count, texts, seed=0):
    rng = random.Random(seed)
    names = [f"text {n}" for n in range(texts)]
    return [Pair(*rng.sample(names, 2), (rng.choice(names),), line) for line in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_split_keeps_a_text_on_one_side(tmp_path, seed):
    """No text is on both sides, however it is spelled; no pair is lost; the seed decides."""
    made = [*drawn(200, 2_000, seed), *(Pair(f"a {n}", f"b {n}") for n in range(100))]
    made += [Pair(f"  A  {n}", f"c {n}") for n in range(100)]
    parts = split(tmp_path, made, 0.2, seed)
    sides = [
        {same(t) for pair in side for t in pair.texts} for side in (parts.trained, parts.held_out)
    ]
    assert not sides[0] & sides[1]
    assert sorted([*parts.trained, *parts.held_out], key=made.index) == made
    assert 0.15 * len(made) < len(parts.held_out) <= 0.2 * len(made)
    assert split(tmp_path, made, 0.2, seed) == parts
    assert split(tmp_path, made, 0.2, seed + 1) != parts


def test_split_refuses_too_few_pairs(tmp_path):
    """Too few in all, or all tied together by one text, is said with the numbers."""
    few = [Pair(f"a {n}", f"b {n}") for n in range(10)]
    tied = [Pair("the same question", f"b {n}") for n in range(500)]
    for made in (few, tied, []):
        with pytest.raises(OperatorError, match=f"too few pairs: of {len(made)}"):
            split(tmp_path, made, 0.2, 0)


def test_split_bounds_what_is_measured(tmp_path):
    """However many pairs there are, so many are held out at most."""
    made = [Pair(f"a {n}", f"b {n}") for n in range(3 * rules.MAX_HELD_OUT)]
    assert len(split(tmp_path, made, 0.9, 0).held_out) == rules.MAX_HELD_OUT


def test_measures_are_those_of_their_definition():
    """Against a plain count over all candidates, more of them than are compared at once."""
    rng = np.random.default_rng(0)
    anchors, candidates = (rng.normal(size=(600, 8)).astype(np.float32) for _ in range(2))
    candidates[::2] += 2 * anchors[::2]
    anchors /= np.linalg.norm(anchors, axis=1, keepdims=True)
    candidates /= np.linalg.norm(candidates, axis=1, keepdims=True)
    found = measure(anchors, candidates, [{n} for n in range(600)])
    cosines = anchors @ candidates.T
    own = np.diag(cosines)
    ranks = (cosines >= own[:, None]).sum(axis=1)
    assert found.recall_at_1 == pytest.approx((ranks == 1).mean())
    assert found.mrr == pytest.approx((1 / ranks).mean())
    assert found.cosine == pytest.approx(own.mean(), abs=1e-6)
    assert found.cosine_others == pytest.approx((cosines.sum() - own.sum()) / (600 * 599), abs=1e-6)


def test_measures_of_vectors_that_are_all_alike_are_no_success():
    """A tie counts against the model, and the best of several right ones counts for it."""
    alike = np.tile(np.float32([1, 0]), (10, 1))
    assert measure(alike, alike, [{n} for n in range(10)]).recall_at_1 == 0
    anchor, candidates = np.float32([[1, 0]]), np.float32([[0, 1], [1, 0], [0.6, 0.8]])
    assert measure(anchor, candidates, [{0, 1}]).recall_at_1 == 1


def test_loss_takes_no_right_text_for_a_wrong_one():
    """Another's text that equals the positive, or belongs to an equal anchor, is left out."""
    batch = [Pair("q", "a"), Pair("Q ", "b", ("c",)), Pair("r", "A"), Pair("s", "d", ("b",))]
    assert others_that_are_right(batch) == [
        # a      b      A      d      c      b
        [False, True, True, False, False, True],
        [True, False, True, False, False, True],
        [True, False, False, False, False, False],
        [False, False, False, False, False, False],
    ]
