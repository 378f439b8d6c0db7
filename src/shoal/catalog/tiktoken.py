"""A `tokenizer.json` out of a pickled tiktoken encoding, without running what the pickle asks for.

tiktoken pickles an encoding as its name, its pattern, the ranks of its byte strings and its special
tokens. The unpickler here knows the encoding's class, as a bag of plain values, and refuses every
other name, so a hostile file can at most fail to be read. Byte pairs join in the order of their
ranks; the file lists every pair that makes a ranked string (Sennrich et al. 2016; bytes are written
as GPT-2 does, Radford et al. 2019).

Special tokens are in the vocabulary but never found in a text, as with tiktoken's
`encode_ordinary`: no caller can write one. Owns that conversion and where its file is kept. Does
not decide whether a pickle may be read (`resolve`), and encodes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from shoal.errors import ModelUnavailable

_T = TypeVar("_T")

MAX_FILE_BYTES = 16 * 1024 * 1024
# Finding the pairs that make a token takes time in the square of its length.
MAX_TOKEN_BYTES = 1024
# A new one for every change of what is made, so that what older versions made is not used.
_FORM = "1"

# A damaged pickle ends in any of these; none of them says more than that.
_DAMAGED = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class _Encoding:
    """What the pickle says of an encoding, unchecked."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Builds an encoding of plain values; every other name in the pickle is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("tiktoken.core", "Encoding"):
            return _Encoding
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no encoding needs")


def converted(path: Path, cache_dir: Path, first_token: str | None) -> Path:
    """The `tokenizer.json` of a pickled encoding, from the cache or made there.

    first_token: the special token that begins every text. Raises `ModelUnavailable` for a file that
    is no such pickle, is over `MAX_FILE_BYTES`, has a token over `MAX_TOKEN_BYTES` or asks to run
    code.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ModelUnavailable(f"{path} is over {MAX_FILE_BYTES} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise ModelUnavailable(f"{path} cannot be read: {error}") from error
    facts = f"{_FORM} {first_token} ".encode()
    target = cache_dir / "tokenizers" / f"{hashlib.sha256(facts + data).hexdigest()}.json"
    if target.is_file():
        return target
    try:
        made = _tokenizer(_Unpickler(BytesIO(data), encoding="utf-8").load(), first_token)
    except _DAMAGED as error:
        raise ModelUnavailable(f"{path} is no pickled tiktoken encoding: {error}") from error
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(made), "utf-8")
        part.replace(target)
    except OSError as error:
        raise ModelUnavailable(f"{target} cannot be written: {error}") from error
    return target


def _tokenizer(encoding: Any, first_token: str | None) -> dict[str, Any]:
    """The contents of `tokenizer.json`. Raises one of `_DAMAGED` for values that do not fit."""
    state = encoding.state
    ranks = _table(state["mergeable_ranks"], bytes)
    special = _table(state["special_tokens"], str)
    if any(len(key) > MAX_TOKEN_BYTES for key in ranks):
        raise ValueError(f"one of its tokens is over {MAX_TOKEN_BYTES} bytes")
    names = {key: "".join(_CHARACTERS[byte] for byte in key) for key in ranks}
    vocabulary = {names[key]: rank for key, rank in ranks.items()} | special
    if len(set(vocabulary.values())) != len(ranks) + len(special):
        raise ValueError("two of its tokens have one name or one id")
    merges = [
        [names[key[:at]], names[key[at:]]]
        for key in sorted(ranks, key=ranks.__getitem__)
        for at in range(1, len(key))
        if key[:at] in ranks and key[at:] in ranks
    ]
    pattern = _checked(state["pat_str"], str)
    pieces = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    as_bytes = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    steps = [pieces | {"invert": False}, {"type": "ByteLevel"} | as_bytes]
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None if first_token is None else _beginning(first_token, special),
        "decoder": {"type": "ByteLevel"} | as_bytes,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }


def _table(table: Any, kind: type[_T]) -> dict[_T, int]:
    return {_checked(key, kind): _checked(number, int) for key, number in table.items()}


def _checked(value: Any, kind: type[_T]) -> _T:
    if type(value) is not kind:
        raise TypeError(f"one of its values is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _beginning(token: str, special: dict[str, int]) -> dict[str, Any]:
    """What puts a special token before every text."""
    if token not in special:
        raise ValueError(f"it has no special token {token!r}, only {', '.join(special)}")
    begin = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": at, "type_id": n}} for n, at in enumerate("AB"))
    ids = {token: {"id": token, "ids": [special[token]], "tokens": [token]}}
    return {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [begin, first, second],
        "special_tokens": ids,
    }


def _characters() -> dict[int, str]:
    """The character that stands for each byte, as byte-level vocabularies are written.

    A byte that prints is written as itself, the others as the characters from the 256th on.
    """
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in prints]
    return {byte: chr(byte) for byte in prints} | {
        byte: chr(0x100 + at) for at, byte in enumerate(others)
    }


_CHARACTERS = _characters()
