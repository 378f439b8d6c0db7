"""What becomes of an item's inputs before a runtime sees them."""

from __future__ import annotations

import json
from itertools import pairwise
from time import thread_time

import numpy as np
import pytest

from shoal.catalog.schema import Entry
from shoal.errors import InputTooLong, InvalidRequest
from shoal.ipc.messages import Traits
from shoal.wire.envelope import Envelope, Inputs, Params
from shoal.worker.tokenise import Tokeniser, prepare
from shoal.worker.windows import windows, word_spans

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "an", "##na", "meet", "##s", "bo", "##b", ".", "🙂"]
ROOM = 8
TRAITS = Traits(accepts_ids=True, tasks=["encode", "score", "classify", "extract"])


def write_tokenizer(path, *, second_type=1) -> None:
    """A word-piece tokenizer over `WORDS` that puts [CLS] and [SEP] around a text."""
    special = [
        {
            "id": i,
            "content": WORDS[i],
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i in range(4)
    ]
    pieces = [{"SpecialToken": {"id": name, "type_id": 0}} for name in ("[CLS]", "[SEP]")]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    document = {
        "version": "1.0",
        "truncation": {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [pieces[0], text, pieces[1]],
            "pair": [
                pieces[0],
                text,
                pieces[1],
                {"Sequence": {"id": "B", "type_id": second_type}},
                {"SpecialToken": {"id": "[SEP]", "type_id": second_type}},
            ],
            "special_tokens": {
                WORDS[i]: {"id": WORDS[i], "ids": [i], "tokens": [WORDS[i]]} for i in (2, 3)
            },
        },
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 20,
            "vocab": {word: i for i, word in enumerate(WORDS)},
        },
    }
    path.write_text(json.dumps(document))


@pytest.fixture(scope="module")
def tokeniser(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    write_tokenizer(path)
    return Tokeniser(path, ROOM)


def entry(**fields) -> Entry:
    return Entry("m", ["encode", "score", "classify", "extract"], "file:///m", **fields)


def sent(task, **params) -> Envelope:
    return Envelope(
        "i", "r", 0, 1, task, "m", "1", "interactive", 1, 1, 0.0, 0.0, "", Params(**params)
    )


def ids_of(item) -> list[list[int]]:
    flat = iter(np.frombuffer(item.ids, "<u2").tolist())
    return [[next(flat) for _ in range(length)] for length in item.lengths]


def spans_of(item) -> list[list[tuple[int, int]]]:
    flat = iter(np.frombuffer(item.offsets, "<u4").reshape(-1, 2).tolist())
    return [[tuple(next(flat)) for _ in range(length)] for length in item.lengths]


LONG = "bob " * ROOM


def test_partial_item_leaves_out_the_input_at_fault(tokeniser):
    """A text that is too long is a failure of its own; the others run, in order."""
    inputs = Inputs(texts=["anna", LONG, "bob"])
    ready = prepare(entry(), TRAITS, tokeniser, sent("encode", partial=True), inputs)
    assert ids_of(ready.run_item) == [[2, 4, 5, 3], [2, 8, 9, 3]]
    assert {index: type(error) for index, error in ready.failures.items()} == {1: InputTooLong}
    assert ready.failures[1].input_index == 1
    with pytest.raises(InputTooLong):
        prepare(entry(), TRAITS, tokeniser, sent("encode"), inputs)


def test_partial_item_of_faults_alone_has_nothing_to_run(tokeniser):
    """Where no input is left there is no item to run, and each has its own failure."""
    inputs = Inputs(ids=[[len(WORDS)], [4] * (ROOM + 1)])
    ready = prepare(entry(), TRAITS, tokeniser, sent("encode", partial=True), inputs)
    assert ready.run_item is None
    assert [type(ready.failures[i]) for i in (0, 1)] == [InvalidRequest, InputTooLong]


def test_empty_input_is_refused_where_it_is_tokenised(tmp_path):
    """A text of which no token is left is the caller's fault, and fails alone."""
    write_tokenizer(tmp_path / "tokenizer.json")
    bare = Tokeniser(tmp_path / "tokenizer.json", ROOM, bare=True)
    inputs = Inputs(texts=["anna", " ", "bob"])
    ready = prepare(entry(), TRAITS, bare, sent("encode", partial=True), inputs)
    assert ids_of(ready.run_item) == [[4, 5], [8, 9]]
    assert ready.failures[1].message == "the input has no tokens"
    with pytest.raises(InvalidRequest, match="no tokens") as refused:
        prepare(entry(), TRAITS, bare, sent("encode"), inputs)
    assert refused.value.input_index == 1
    with pytest.raises(InvalidRequest, match="the query has no tokens") as refused:
        prepare(
            entry(), TRAITS, bare, sent("score", partial=True), Inputs(texts=["bob"], query=" ")
        )
    assert refused.value.param == "query"


def test_partial_score_fails_as_a_whole_with_its_query(tokeniser):
    """No document can be scored against a query that is too long."""
    inputs = Inputs(texts=["bob", LONG], query=LONG)
    with pytest.raises(InputTooLong) as caught:
        prepare(entry(), TRAITS, tokeniser, sent("score", partial=True), inputs)
    assert caught.value.param == "query"
    ready = prepare(
        entry(),
        TRAITS,
        tokeniser,
        sent("score", partial=True),
        Inputs(texts=[LONG, "bob"], query="anna"),
    )
    assert ready.run_item.layout == "shared"
    assert ids_of(ready.run_item) == [[2, 4, 5, 3], [2, 8, 9, 3]]
    assert list(ready.failures) == [0]


def test_partial_pairs_go_as_pairs(tokeniser):
    """A pair whose second text is at fault leaves with its first."""
    inputs = Inputs(texts=["bob", LONG, "anna"], firsts=["anna", "anna", "bob"])
    ready = prepare(entry(), TRAITS, tokeniser, sent("classify", partial=True), inputs)
    assert ready.run_item.layout == "pairs"
    assert ids_of(ready.run_item) == [[2, 4, 5, 3], [2, 8, 9, 3], [2, 8, 9, 3], [2, 4, 5, 3]]
    assert list(ready.failures) == [1]


@pytest.mark.parametrize("second_type", [0, 1])
def test_joint_pair_says_where_its_second_text_begins_only_if_its_tokenizer_does(
    tmp_path, second_type
):
    """RoBERTa's tokenizers give both texts one type: the pair runs as a single sequence."""
    write_tokenizer(tmp_path / "tokenizer.json", second_type=second_type)
    told = Tokeniser(tmp_path / "tokenizer.json", ROOM)
    inputs = Inputs(texts=["bob", LONG], query="anna")
    sent_item = sent("score", truncate=True)
    item = prepare(entry(scorer="joint"), TRAITS, told, sent_item, inputs).run_item
    assert ids_of(item)[0] == [2, 4, 5, 3, 8, 9, 3]
    assert item.lengths == [7, ROOM]
    assert item.second_at == ([4, 4] if second_type else [])


def test_long_text_is_read_in_windows_that_overlap(tokeniser):
    """Every window is as long as the model takes, with special tokens; spans are of words.

    Characters count as code points: what stands before a word may be outside the basic plane.
    """
    text = "🙂 anna meets bob. " * 3
    ready = prepare(entry(), TRAITS, tokeniser, sent("extract"), Inputs(texts=["bob", text]))
    item = ready.run_item
    assert item.owners[0] == 0
    assert set(item.owners[1:]) == {1}
    assert item.lengths[1:] == [ROOM] * (len(item.owners) - 1)
    seen = set()
    for ids, spans in zip(ids_of(item)[1:], spans_of(item)[1:], strict=True):
        assert (ids[0], ids[-1]) == (2, 3)
        assert (spans[0], spans[-1]) == ((0, 0), (0, 0))
        for token, (start, end) in zip(ids[1:-1], spans[1:-1], strict=True):
            assert WORDS[token].removeprefix("##") in text[start:end]
            seen.add((start, end))
    words = ["🙂", "anna", "meets", "bob", "."] * 3
    assert [text[start:end] for start, end in sorted(seen)] == words


def test_word_spans_take_time_in_proportion_to_the_pieces_of_a_word():
    """One word of a whole text's pieces costs about what as many words do."""
    n = 20_000
    text, pieces = "a" * n, [(at, at + 1) for at in range(n)]
    took_s = []
    for words in (range(n), [0] * n):
        begun_s = thread_time()
        spans = word_spans(text, pieces, words)
        took_s.append(thread_time() - begun_s)
    assert spans == [(0, n)] * n
    assert took_s[1] < 10 * took_s[0]


def test_windows_cover_all_tokens_and_share_a_quarter():
    """No token is left out, none is in a window alone at its cut edge, the last is a full one."""
    for tokens in (1, 10, 11, 40, 1_000):
        cuts = windows(tokens, 10)
        assert cuts[0][0] == 0
        assert cuts[-1][1] == tokens
        assert all(end - start == min(tokens, 10) for start, end in cuts)
        assert all(a[1] - b[0] >= 2 for a, b in pairwise(cuts))


def test_static_vectors_are_read_without_special_or_unknown_tokens(tmp_path):
    """A bare tokenizer drops both, but never all of a text."""
    write_tokenizer(tmp_path / "tokenizer.json")
    bare = Tokeniser(tmp_path / "tokenizer.json", ROOM, bare=True)
    ready = prepare(entry(), TRAITS, bare, sent("encode"), Inputs(texts=["anna xyz", "xyz"]))
    assert ids_of(ready.run_item) == [[4, 5], [1]]


def test_special_tokens_are_marked_where_the_model_leaves_them_out(tokeniser):
    """The option says so; without it nothing more than ids travels."""
    inputs = Inputs(texts=["anna bob"])
    marked = prepare(
        entry(options={"special_tokens": False}), TRAITS, tokeniser, sent("encode"), inputs
    )
    at_home = [span != (0, 0) for span in spans_of(marked.run_item)[0]]
    assert at_home == [False, True, True, True, True, False]
    assert prepare(entry(), TRAITS, tokeniser, sent("encode"), inputs).run_item.offsets == b""


def picture(width: int, height: int) -> bytes:
    """The beginning of a PNG file."""
    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + size + b"\x08\x02\0\0\0"


def test_blobs_travel_with_their_estimated_cost():
    """Bytes that are no text go on as they are; a larger picture is longer, and nothing is free."""
    blobs = [b"", picture(640, 480), picture(1280, 960)]
    ready = prepare(entry(), TRAITS, None, sent("extract"), Inputs(blobs=blobs))
    assert ready.run_item.blobs == blobs
    none, small, large = ready.run_item.lengths
    assert none > 0
    assert 0 < small < large
