"""A pickled tiktoken encoding becomes a tokenizer.json: equal ids, and no code is run."""

from __future__ import annotations

import pickle

import pytest
import tiktoken
from tokenizers import Tokenizer

from shoal.catalog.resolve import tokenizer_path
from shoal.catalog.schema import Entry
from shoal.catalog.tiktoken import MAX_FILE_BYTES, MAX_TOKEN_BYTES, converted
from shoal.errors import ModelUnavailable, WeightsMissing

BEGIN = "<|begin|>"
# Pairs that join in several ways (abc is a + bc as well as ab + c), and bytes that are no text.
RANKS = {bytes([byte]): byte for byte in range(256)} | {
    joined: 256 + rank
    for rank, joined in enumerate(
        [b"bc", b"ab", b"abc", b" a", b"\xc3\xa9", b"\xf0\x9f", b"aa", b"aaa", b" abc", b"12"]
    )
}
PATTERN = r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s+(?!\S)|\s+"
TEXTS = [
    "abc aabc abca aaaaa",
    "é 🐟 \x00 abécb",
    " \n\n  x\r\n a",
    "",
    "1234 12",
    f"a {BEGIN}b",
    "日本語 İ\u0301 \u00a0\ufeff",
]


@pytest.fixture(scope="module")
def encoding():
    special = {BEGIN: 300, "<|end|>": 301}
    return tiktoken.Encoding(
        "small", pat_str=PATTERN, mergeable_ranks=RANKS, special_tokens=special
    )


@pytest.fixture
def pickled(encoding, tmp_path):
    path = tmp_path / "tokenizer.pkl"
    path.write_bytes(pickle.dumps(encoding))
    return path


def test_tiktoken_ids_are_those_of_the_library(encoding, pickled, tmp_path):
    """Each text has tiktoken's ids, begun by the token that was asked for; no text can write it."""
    begun = Tokenizer.from_file(str(converted(pickled, tmp_path, BEGIN)))
    bare = Tokenizer.from_file(str(converted(pickled, tmp_path, None)))
    for text in TEXTS:
        expected = encoding.encode_ordinary(text)
        assert begun.encode(text).ids == [300, *expected]
        assert bare.encode(text).ids == expected
        assert bare.decode(expected, skip_special_tokens=False) == text
    assert begun.encode("a").special_tokens_mask == [1, 0]


def test_tiktoken_file_is_made_once(pickled, tmp_path):
    """The second call finds the file; another first token, or another pickle, has another file."""
    made = converted(pickled, tmp_path, BEGIN)
    made.write_text("kept")
    assert converted(pickled, tmp_path, BEGIN).read_text() == "kept"
    assert converted(pickled, tmp_path, "<|end|>") != made
    pickled.write_bytes(pickled.read_bytes().replace(b"<|end|>", b"<|eos|>"))
    assert converted(pickled, tmp_path, BEGIN) != made


class Touch:
    """Unpickled by pickle itself, this would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_tiktoken_pickle_that_would_run_code_is_refused(encoding, tmp_path):
    """Code in an encoding's values is refused by its name, and does not run."""
    hostile = tmp_path / "evil.pkl"
    state = encoding.__getstate__() | {"pat_str": Touch(tmp_path / "made")}
    hostile.write_bytes(pickle.dumps((encoding, state)))
    with pytest.raises(ModelUnavailable, match=r"names .*open"):
        converted(hostile, tmp_path, None)
    assert not (tmp_path / "made").exists()


class _Encoding:
    """Pickled as an encoding of that state, whatever it is."""

    def __init__(self, state):
        self.state = state

    def __reduce__(self):
        return (tiktoken.Encoding, (), self.state)


@pytest.mark.parametrize(
    "changes",
    [
        {"mergeable_ranks": {"a": 1}},
        {"mergeable_ranks": {b"a": "1"}},
        {"mergeable_ranks": {b"a": 1, b"b": 1}},
        {"mergeable_ranks": None},
        {"special_tokens": {"a": 97}},
        {"special_tokens": {}},
        {"pat_str": None},
        {"pat_str": ["x" * 10_000]},
    ],
    ids=lambda changes: repr(changes)[:40],
)
def test_tiktoken_values_that_do_not_fit_are_refused(encoding, pickled, tmp_path, changes):
    """Wrong types, doubled ids and a missing first token are a fault of the file, not of ours."""
    state = encoding.__getstate__() | changes
    pickled.write_bytes(pickle.dumps(_Encoding(state)))
    with pytest.raises(ModelUnavailable, match="is no pickled tiktoken encoding") as refused:
        converted(pickled, tmp_path, BEGIN)
    assert len(refused.value.message) < 1000  # whatever is in the file


def test_tiktoken_pickle_that_is_damaged_or_too_large_is_refused(pickled, tmp_path):
    """Cut anywhere, empty, or over the limit, the file is refused before it is believed."""
    whole = pickled.read_bytes()
    for size in (0, 1, 20, len(whole) // 2, len(whole) - 1):
        pickled.write_bytes(whole[:size])
        with pytest.raises(ModelUnavailable, match="is no pickled tiktoken encoding"):
            converted(pickled, tmp_path, BEGIN)
    with pickled.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ModelUnavailable, match=f"over {MAX_FILE_BYTES} bytes"):
        converted(pickled, tmp_path, BEGIN)


def test_tiktoken_token_is_believed_up_to_its_limit(encoding, pickled, tmp_path):
    """A token as long as allowed is converted; with one byte more it is refused."""
    for longest in (MAX_TOKEN_BYTES, MAX_TOKEN_BYTES + 1):
        ranks = RANKS | {b"a" * longest: 299}
        state = encoding.__getstate__() | {"mergeable_ranks": ranks}
        pickled.write_bytes(pickle.dumps(_Encoding(state)))
        if longest == MAX_TOKEN_BYTES:
            assert "a" * longest in Tokenizer.from_file(
                str(converted(pickled, tmp_path, None))
            ).get_vocab(with_added_tokens=False)
            continue
        with pytest.raises(ModelUnavailable, match=f"over {MAX_TOKEN_BYTES} bytes"):
            converted(pickled, tmp_path, None)


def test_tokenizer_path_converts_a_pickle_only_where_the_entry_allows_it(pickled, tmp_path):
    """Without `allow_pickle` it is refused; without a cache folder nothing is made."""
    fields = {
        "id": "m",
        "tasks": ["classify"],
        "source": f"file://{tmp_path}",
        "tokenizer": f"file://{pickled}",
        "options": {"first_token": BEGIN},
    }
    with pytest.raises(ModelUnavailable, match="needs `allow_pickle: true`"):
        tokenizer_path(Entry(**fields), tmp_path)
    allowed = Entry(**fields, allow_pickle=True)
    assert tokenizer_path(allowed, tmp_path) == converted(pickled, tmp_path, BEGIN)
    with pytest.raises(WeightsMissing, match="would have to be converted"):
        tokenizer_path(allowed)
