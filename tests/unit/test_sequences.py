"""Cutting items into token sequences, laying them out, and pooling what comes back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import InputTooLong, InvalidRequest
from shoal.ipc.messages import RunItem
from shoal.runtimes.inputs import alone
from shoal.runtimes.pooling import Hidden, pieces
from shoal.runtimes.sequences import Limits, TokenSequence, cut, end_to_end, pad

LIMITS = Limits(tokens=8, vocab=100)
ragged = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def sequence(*ids, second_at=0):
    return TokenSequence(np.array(ids, "<u2").tobytes(), 2, second_at)


def sent(lengths, ids, **fields):
    width = fields.setdefault("id_bytes", 2)
    return RunItem("i", "encode", lengths, ids=np.array(ids, f"<u{width}").tobytes(), **fields)


@pytest.mark.parametrize("id_bytes", [2, 4])
def test_items_are_cut_at_their_lengths(id_bytes):
    """Ids of both widths come out as they went in, second texts with their sequence."""
    item = sent([2, 1, 3], [1, 2, 3, 4, 5, 6], id_bytes=id_bytes, second_at=[1, 0, 2])
    found = cut(item, LIMITS)
    assert [one.ids.tolist() for one in found] == [[1, 2], [3], [4, 5, 6]]
    assert [one.second_at for one in found] == [1, 0, 2]


@pytest.mark.parametrize(
    ("item", "kind", "says"),
    [
        (sent([9], range(9)), InputTooLong, "the input has 9 tokens, the model takes 8"),
        (sent([1, 9], range(10), layout="shared"), InputTooLong, "the input has 9"),
        (sent([9, 1], range(10), layout="shared"), InputTooLong, "the query has 9"),
        (sent([1, 1, 9], range(11), layout="pairs"), InputTooLong, "the input has 9"),
        (sent([1, 0], [1]), InvalidRequest, "the input has no tokens"),
        (sent([2], [1, 100]), InvalidRequest, "token id 100, the vocabulary ends at 99"),
        (sent([2], [1]), InvalidRequest, "do not fit"),
        (sent([1, 1], [1, 2], second_at=[1]), InvalidRequest, "second_at"),
        (sent([1], [1], second_at=[3]), InvalidRequest, "the input"),
        (RunItem("i", "encode", [1], ids=b"123", id_bytes=3), InvalidRequest, "do not fit"),
    ],
)
def test_what_cannot_be_run_is_named(item, kind, says):
    """Too long, empty, unknown or inconsistent: the error says which input, as a caller counts."""
    with pytest.raises(kind, match=says):
        cut(item, LIMITS)


@pytest.mark.parametrize(
    ("fields", "sequences"),
    [
        ({"second_at": [1, 0, 2, 0]}, [[[1, 2]], [[3]], [[4, 5]], [[6]]]),
        ({"layout": "shared"}, [[[1, 2], [3]], [[1, 2], [4, 5]], [[1, 2], [6]]]),
        ({"layout": "pairs"}, [[[1, 2], [3]], [[4, 5], [6]]]),
        ({"owners": [0, 1, 1, 2]}, [[[1, 2]], [[3], [4, 5]], [[6]]]),
    ],
)
def test_an_item_of_one_input_has_all_of_its_sequences(fields, sequences):
    """A query goes with each document, both texts with their pair, all windows with their text."""
    offsets = np.arange(12, dtype="<u4").tobytes()
    item = sent([2, 1, 2, 1], [1, 2, 3, 4, 5, 6], offsets=offsets, **fields)
    parts = alone(item)
    assert [[one.ids.tolist() for one in cut(part, LIMITS)] for part in parts] == sequences
    for part in parts:
        where = [(2 * token - 2, 2 * token - 1) for one in cut(part, LIMITS) for token in one.ids]
        assert np.frombuffer(part.offsets, "<u4").reshape(-1, 2).tolist() == [*map(list, where)]
        assert not any(part.owners)
    if "second_at" in fields:
        assert [part.second_at for part in parts] == [[1], [0], [2], [0]]


def test_equal_sequences_are_equal_only_with_the_same_second_text():
    """What is run once for several inputs is the same ids read in the same way."""
    assert sequence(1, 2) == sequence(1, 2)
    assert sequence(1, 2, 3, second_at=1) != sequence(1, 2, 3)


def test_padding_is_on_the_right_with_types_from_the_second_text():
    """Rows of the longest's length; the mask is 1 at real tokens, types only within them."""
    rows = pad([sequence(5, 6, 7, second_at=1), sequence(8)], pad_id=3)
    assert rows.ids.tolist() == [[5, 6, 7], [8, 3, 3]]
    assert rows.mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert rows.types.tolist() == [[0, 1, 1], [0, 0, 0]]


def test_end_to_end_starts_positions_anew():
    """Without padding: positions and types of each sequence are its own."""
    flat = end_to_end([sequence(5, 6, 7, second_at=2), sequence(8, 9)])
    assert flat.ids.tolist() == [5, 6, 7, 8, 9]
    assert flat.positions.tolist() == [0, 1, 2, 0, 1]
    assert flat.types.tolist() == [0, 0, 1, 0, 0]


def hidden_of(lengths):
    """The same states in both layouts, with noise where there is padding, and the truth."""
    rng = np.random.default_rng(len(lengths))
    truth = [rng.normal(size=(n, 4)).astype(np.float32) for n in lengths]
    padded = rng.normal(size=(len(lengths), max(lengths), 4)).astype(np.float32) * 1e6
    for row, states in zip(padded, truth, strict=True):
        row[: len(states)] = states
    counts = np.array(lengths)
    return truth, Hidden(padded, counts), Hidden(np.concatenate(truth), counts, packed=True)


@settings(max_examples=40)
@given(ragged)
def test_pooling_is_the_same_in_both_layouts(lengths):
    """Mean, first and last token are those of the real tokens, whatever padding holds."""
    truth, padded, packed = hidden_of(lengths)
    for hidden in (padded, packed):
        means = np.stack([states.mean(axis=0) for states in truth])
        assert np.abs(hidden.pool("mean") - means).max() < 1e-5
        assert np.array_equal(hidden.pool("cls"), np.stack([states[0] for states in truth]))
        assert np.array_equal(hidden.pool("last"), np.stack([states[-1] for states in truth]))


@settings(max_examples=40)
@given(ragged, st.integers(1, 30))
def test_pieces_cover_each_sequence_once_and_keep_its_maximum(lengths, max_tokens):
    """Every index comes once, rectangles keep to the bound, and filling changes no maximum."""
    truth, padded, packed = hidden_of(lengths)
    for hidden in (padded, packed):
        seen = []
        for chosen, block in pieces(hidden, max_tokens):
            assert len(chosen) == 1 or block.shape[0] * block.shape[1] <= max_tokens
            for index, row in zip(chosen, block, strict=True):
                assert np.array_equal(row.max(axis=0), truth[index].max(axis=0))
            seen += chosen
        assert sorted(seen) == list(range(len(lengths)))
