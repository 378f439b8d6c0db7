"""From an item's inputs to the sequences that a runtime runs.

Owns tokenising (once, here, for runtimes that accept ids), prompts, the layout of pairs and the
refusal of over-long inputs. Does not own threads: `prepare` is called in a pool. Tokenizer files
may carry their own truncation and padding; both are switched off, for they belong to the request.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from shoal.catalog.schema import Entry
from shoal.errors import InputTooLong, InvalidRequest, ModelUnavailable
from shoal.ipc.messages import RunItem, Traits
from shoal.wire.envelope import Envelope, Inputs

Layout = Literal["single", "shared", "pairs"]
_U16_VOCABULARY = 65_536


@dataclass(frozen=True, slots=True)
class _Text:
    """A sequence to be: a text, or a pair that is read at once. index: the input it came from."""

    index: int | None
    first: str
    second: str | None = None


class Tokeniser:
    """One model's tokenizer.

    Raises `ModelUnavailable` when the file cannot be read.
    """

    def __init__(self, path: Path, max_tokens: int) -> None:
        try:
            self._whole = Tokenizer.from_file(str(path))
            self._cutting = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for every bad file
            raise ModelUnavailable(f"{path} is no tokenizer: {error}") from error
        self.max_tokens = max_tokens
        self._whole.no_truncation()
        self._whole.no_padding()
        self._cutting.no_padding()
        self._cutting.enable_truncation(max_tokens)
        self.vocabulary = self._whole.get_vocab_size(with_added_tokens=True)
        self.id_bytes = 2 if self.vocabulary <= _U16_VOCABULARY else 4

    def ids(self, text: _Text, *, truncate: bool) -> tuple[list[int], int]:
        """The ids of a text with its special tokens, and where a pair's second text begins.

        Raises `InputTooLong` when there are more than the model takes and `truncate` is off.
        """
        encoded = self._whole.encode(text.first, text.second)
        if len(encoded.ids) > self.max_tokens:
            if not truncate:
                raise _too_long(text.index, len(encoded.ids), self.max_tokens)
            encoded = self._cutting.encode(text.first, text.second)
        second_at = encoded.type_ids.index(1) if text.second is not None else 0
        return encoded.ids, second_at

    def check(self, ids: Sequence[int], index: int, *, truncate: bool) -> Sequence[int]:
        """Ids that the caller made: within the vocabulary and the length."""
        worst = max(ids, default=0)
        if worst >= self.vocabulary:
            raise InvalidRequest(
                f"token id {worst} is outside the model's vocabulary of {self.vocabulary}",
                input_index=index,
            )
        if len(ids) > self.max_tokens:
            if not truncate:
                raise _too_long(index, len(ids), self.max_tokens)
            return ids[: self.max_tokens]
        return ids


def _too_long(index: int | None, tokens: int, max_tokens: int) -> InputTooLong:
    what = "the query" if index is None else "the input"
    return InputTooLong(
        f"{what} has {tokens} tokens and the model takes {max_tokens}; shorten it or set "
        "`truncate` to true",
        param="query" if index is None else None,
        input_index=index,
    )


def prepare(
    entry: Entry, traits: Traits, tokeniser: Tokeniser | None, envelope: Envelope, inputs: Inputs
) -> RunItem:
    """The item as its runtime wants it. Raises a `CallerError` that names the input at fault."""
    layout, texts = _layout(entry, envelope, inputs)
    truncate = envelope.params.truncate
    if not traits.accepts_ids or tokeniser is None:
        return _as_texts(entry, envelope, inputs, layout, texts)
    typecode = "H" if tokeniser.id_bytes == 2 else "I"
    ids = array(typecode)
    lengths: list[int] = []
    second_at: list[int] = []
    if inputs.ids:
        for index, given in enumerate(inputs.ids):
            kept = tokeniser.check(given, index, truncate=truncate)
            ids.extend(kept)
            lengths.append(len(kept))
    for text in texts:
        made, second = tokeniser.ids(text, truncate=truncate)
        ids.extend(made)
        lengths.append(len(made))
        second_at.append(second)
    if sys.byteorder == "big":
        ids.byteswap()
    return RunItem(
        envelope.item,
        envelope.task,
        lengths,
        layout,
        ids=ids.tobytes(),
        id_bytes=tokeniser.id_bytes,
        second_at=second_at if any(second_at) else [],
        params=envelope.params,
    )


def _layout(entry: Entry, envelope: Envelope, inputs: Inputs) -> tuple[Layout, list[_Text]]:
    """What the sequences are, and their texts with prompts."""
    joint = entry.scorer == "joint"
    if envelope.task == "score":
        if inputs.query is None:
            raise InvalidRequest("a query is needed", param="query")
        query = entry.prompts.get("query", "") + inputs.query
        before = entry.prompts.get("document", "")
        if joint:
            return "single", [_Text(i, query, before + t) for i, t in enumerate(inputs.texts)]
        documents = [_Text(i, before + t) for i, t in enumerate(inputs.texts)]
        return "shared", [_Text(None, query), *documents]
    if inputs.firsts:
        pairs = enumerate(zip(inputs.firsts, inputs.texts, strict=True))
        if joint:
            return "single", [_Text(i, a, b) for i, (a, b) in pairs]
        return "pairs", [_Text(i, text) for i, pair in pairs for text in pair]
    name = envelope.params.prompt
    if name is not None and name not in entry.prompts:
        raise InvalidRequest(f"the model has no prompt `{name}`", param="prompt")
    before = entry.prompts[name] if name is not None else ""
    return "single", [_Text(i, before + t) for i, t in enumerate(inputs.texts)]


def _as_texts(
    entry: Entry, envelope: Envelope, inputs: Inputs, layout: Layout, texts: Iterable[_Text]
) -> RunItem:
    """For a runtime that tokenises itself; lengths are estimates."""
    if inputs.ids:
        raise InvalidRequest("this model's runtime takes texts, not token ids", param="input")
    sequences = [t.first if t.second is None else f"{t.first}\n{t.second}" for t in texts]
    per_token = entry.profile.bytes_per_token
    return RunItem(
        envelope.item,
        envelope.task,
        [1 + int(len(text) / per_token) for text in sequences],
        layout,
        texts=sequences,
        params=envelope.params,
    )
