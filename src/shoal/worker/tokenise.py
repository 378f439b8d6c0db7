"""From an item's inputs to the sequences that a runtime runs.

Owns tokenising (once, here, for runtimes that accept ids), prompts, the layout of pairs, windows
over texts that are longer than the model, and the refusal of over-long inputs: of the whole item,
or with `Params.partial` of the input at fault alone. Does not own threads: `prepare` is called in
a pool. Tokenizer files may carry their own truncation and padding; both are switched off, for they
belong to the request.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from msgspec import structs
from tokenizers import Tokenizer

from shoal.catalog.schema import Entry
from shoal.errors import CallerError, InputTooLong, InvalidRequest, ModelUnavailable, ShoalError
from shoal.ipc.messages import RunItem, Traits
from shoal.wire.envelope import Envelope, Inputs
from shoal.wire.generation import Generation
from shoal.wire.media import cost_tokens
from shoal.worker.windows import Span, windows, word_spans

Layout = Literal["single", "shared", "pairs"]
_U16_VOCABULARY = 65_536
_NOWHERE: Span = (0, 0)


@dataclass(frozen=True, slots=True)
class Prepared:
    """An item that is ready to run without the inputs at fault, which `failures` has by index.

    run_item is None where no input is left to run.
    """

    run_item: RunItem | None
    failures: dict[int, ShoalError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Text:
    """A sequence to be: a text, or a pair that is read at once. index: the input it came from."""

    index: int | None
    first: str
    second: str | None = None


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A sequence as it runs. spans: where each id came from, where somebody will ask."""

    ids: Sequence[int]
    second_at: int = 0
    spans: Sequence[Span] = ()


class Tokeniser:
    """One model's tokenizer.

    bare: no special tokens are put around a text and unknown words are dropped, which is how a
    table of static vectors is read. Raises `ModelUnavailable` when the file cannot be read.
    """

    def __init__(self, path: Path, max_tokens: int, *, bare: bool = False) -> None:
        try:
            self._whole = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for every bad file
            raise ModelUnavailable(f"{path} is no tokenizer: {error}") from error
        self.max_tokens = max_tokens
        self._whole.no_truncation()
        self._whole.no_padding()
        self._path = path
        self.vocabulary = self._whole.get_vocab_size(with_added_tokens=True)
        self.id_bytes = 2 if self.vocabulary <= _U16_VOCABULARY else 4
        self._specials = not bare
        self._dropped: int | None = None
        if bare and (unknown := getattr(self._whole.model, "unk_token", None)) is not None:
            self._dropped = self._whole.token_to_id(unknown)

    @cached_property
    def _cutting(self) -> Tokenizer:
        """The same with truncation; a second one, read when it is needed: some are large."""
        cutting = Tokenizer.from_file(str(self._path))
        cutting.no_padding()
        cutting.enable_truncation(self.max_tokens)
        return cutting

    def whole(self, text: str) -> Any:
        """The library's encoding of all of a text, however long."""
        return self._whole.encode(text, add_special_tokens=self._specials)

    def ids(self, text: _Text, *, truncate: bool, spans: bool = False) -> _Sequence:
        """The ids of a text with its special tokens, and where a pair's second text begins.

        With `spans` also where each id came from, (0, 0) for special tokens. Raises `InputTooLong`
        when there are more ids than the model takes and `truncate` is off.
        """
        encoded = self._whole.encode(text.first, text.second, add_special_tokens=self._specials)
        if len(encoded.ids) > self.max_tokens:
            if not truncate:
                raise _too_long(text.index, len(encoded.ids), self.max_tokens)
            encoded = self._cutting.encode(
                text.first, text.second, add_special_tokens=self._specials
            )
        ids = encoded.ids
        if self._dropped is not None:
            # A text of which nothing is known keeps its unknown words: an input has some token.
            ids = [token for token in ids if token != self._dropped] or ids
        # RoBERTa's tokenizers give both texts the type 0, and its networks read no types.
        types = encoded.type_ids if text.second is not None else ()
        second_at = types.index(1) if 1 in types else 0
        places: Sequence[Span] = ()
        if spans:
            # A text's own token never lies at (0, 0): it is as long as one character at least.
            special = encoded.special_tokens_mask
            places = [_NOWHERE if hidden else (0, 1) for hidden in special]
        return _Sequence(ids, second_at, places)

    def windows(self, text: str) -> list[_Sequence]:
        """A text of any length as sequences that the model takes, with the span of each id."""
        encoded = self.whole(text)
        ids, special = encoded.ids, encoded.special_tokens_mask
        spans = word_spans(text, encoded.offsets, encoded.word_ids)
        before = next((i for i, mark in enumerate(special) if not mark), len(ids))
        after = next((i for i, mark in enumerate(reversed(special)) if not mark), 0)
        end = len(ids) - after
        return [
            _Sequence(
                [*ids[:before], *ids[before + a : before + b], *ids[end:]],
                spans=[
                    *[_NOWHERE] * before,
                    *spans[before + a : before + b],
                    *[_NOWHERE] * after,
                ],
            )
            for a, b in windows(end - before, self.max_tokens - before - after)
        ]

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


def _faulty(kind: type[CallerError], index: int | None, why: str) -> CallerError:
    what, param = ("the query", "query") if index is None else ("the input", None)
    return kind(f"{what} {why}", param=param, input_index=index)


def _too_long(index: int | None, tokens: int, max_tokens: int) -> CallerError:
    why = (
        f"has {tokens} tokens and the model takes {max_tokens}; shorten it or set `truncate` to "
        "true"
    )
    return _faulty(InputTooLong, index, why)


def prepare(
    entry: Entry, traits: Traits, tokeniser: Tokeniser | None, envelope: Envelope, inputs: Inputs
) -> Prepared:
    """The item as its runtime wants it.

    Raises a `CallerError` that names the input at fault, unless the request is `partial`: then
    that input alone is left out. A fault of the query is the whole item's.
    """
    if entry.generates:
        return Prepared(_as_text_to_grow(entry, envelope, inputs))
    if inputs.blobs:
        return Prepared(_as_blobs(entry, envelope, inputs))
    layout, query, groups = _layout(entry, envelope, inputs)
    if not traits.accepts_ids or tokeniser is None:
        return Prepared(_as_texts(entry, envelope, inputs, layout, [*query, *chain(*groups)]))
    cutter = _Cutter(entry, tokeniser, envelope)
    sequences = [made for text in query for made in cutter.sequences(text)]
    owners: list[int] = []
    failures: dict[int, ShoalError] = {}
    served = 0
    given: Sequence[Sequence[_Text | _Ids]] = _given(inputs) or groups
    for index, group in enumerate(given):
        try:
            made = [sequence for one in group for sequence in cutter.sequences(one)]
        except CallerError as error:
            if not envelope.params.partial:
                raise
            failures[index] = error
            continue
        sequences += made
        owners += [served] * len(made)
        served += 1
    if failures and not served:
        return Prepared(None, failures)
    if envelope.task != "extract":
        owners = []
    return Prepared(_as_ids(envelope, layout, tokeniser, sequences, owners), failures)


@dataclass(frozen=True, slots=True)
class _Ids:
    """Token ids that the caller made."""

    index: int
    ids: Sequence[int]


def _given(inputs: Inputs) -> list[list[_Ids]]:
    return [[_Ids(index, ids)] for index, ids in enumerate(inputs.ids)]


class _Cutter:
    """From one text, or one list of ids, to its sequences, as the item's task and model want it."""

    def __init__(self, entry: Entry, tokeniser: Tokeniser, envelope: Envelope) -> None:
        self._tokeniser = tokeniser
        self._truncate = envelope.params.truncate
        self._windows = envelope.task == "extract"
        self._spans = entry.options.get("special_tokens") is False

    def sequences(self, one: _Text | _Ids) -> list[_Sequence]:
        """The sequences of an input, none of them empty. Raises `CallerError`."""
        made = self._cut(one)
        if not all(sequence.ids for sequence in made):
            raise _faulty(InvalidRequest, one.index, "has no tokens")
        return made

    def _cut(self, one: _Text | _Ids) -> list[_Sequence]:
        if isinstance(one, _Ids):
            if self._windows:
                raise InvalidRequest("extract takes texts, not token ids", param="inputs")
            kept = self._tokeniser.check(one.ids, one.index, truncate=self._truncate)
            return [_Sequence(kept, spans=[(0, 1)] * len(kept) if self._spans else ())]
        if self._windows:
            return self._tokeniser.windows(one.first)
        return [self._tokeniser.ids(one, truncate=self._truncate, spans=self._spans)]


def _as_ids(
    envelope: Envelope,
    layout: Layout,
    tokeniser: Tokeniser,
    sequences: Sequence[_Sequence],
    owners: list[int],
) -> RunItem:
    ids = array("H" if tokeniser.id_bytes == 2 else "I")
    offsets = array("I")
    for sequence in sequences:
        ids.extend(sequence.ids)
        offsets.extend(chain.from_iterable(sequence.spans))
    if sys.byteorder == "big":
        ids.byteswap()
        offsets.byteswap()
    second_at = [sequence.second_at for sequence in sequences]
    return RunItem(
        envelope.item,
        envelope.task,
        [len(sequence.ids) for sequence in sequences],
        layout,
        ids=ids.tobytes(),
        id_bytes=tokeniser.id_bytes,
        second_at=second_at if any(second_at) else [],
        params=envelope.params,
        owners=owners,
        offsets=offsets.tobytes(),
    )


def _layout(
    entry: Entry, envelope: Envelope, inputs: Inputs
) -> tuple[Layout, list[_Text], list[list[_Text]]]:
    """What the sequences are; the query where it runs alone; the texts of each input, prompted."""
    joint = entry.scorer == "joint"
    if envelope.task == "extract":  # offsets are of the text as it is: no prompts
        return "single", [], [[_Text(i, text)] for i, text in enumerate(inputs.texts)]
    if envelope.task == "score":
        if inputs.query is None:
            raise InvalidRequest("a query is needed", param="query")
        query = entry.prompts.get("query", "") + inputs.query
        before = entry.prompts.get("document", "")
        texts = [before + text for text in inputs.texts]
        if joint:
            return "single", [], [[_Text(i, query, text)] for i, text in enumerate(texts)]
        documents = [[_Text(i, text)] for i, text in enumerate(texts)]
        return "shared", [_Text(None, query)], documents
    if inputs.firsts:
        pairs = enumerate(zip(inputs.firsts, inputs.texts, strict=True))
        if joint:
            return "single", [], [[_Text(i, a, b)] for i, (a, b) in pairs]
        return "pairs", [], [[_Text(i, text) for text in pair] for i, pair in pairs]
    name = envelope.params.prompt
    if name is not None and name not in entry.prompts:
        raise InvalidRequest(f"the model has no prompt `{name}`", param="prompt")
    before = entry.prompts[name] if name is not None else ""
    return "single", [], [[_Text(i, before + text)] for i, text in enumerate(inputs.texts)]


def _as_blobs(entry: Entry, envelope: Envelope, inputs: Inputs) -> RunItem:
    """For inputs that are no texts; a length is an estimate of what an input costs."""
    return RunItem(
        envelope.item,
        envelope.task,
        [cost_tokens(blob, entry.inputs) for blob in inputs.blobs],
        blobs=inputs.blobs,
        params=envelope.params,
    )


def _as_text_to_grow(entry: Entry, envelope: Envelope, inputs: Inputs) -> RunItem:
    """For a generator: one text or conversation. The length is an estimate.

    Its pieces are wanted here in any case: they show that the engine is at work.
    """
    asked = envelope.params.generation or Generation()
    chat = inputs.chats[0] if inputs.chats else []
    if len(inputs.chats) + len(inputs.texts) != 1:
        raise InvalidRequest("one prompt or conversation is continued at a time", param="prompt")
    seed = None if asked.seed is None else asked.seed + envelope.index % asked.n
    texts = [turn.content for turn in chat] or inputs.texts
    size_bytes = sum(len(text.encode()) for text in texts)
    usual = entry.sampling
    generation = structs.replace(
        asked,
        stream=True,
        seed=seed,
        temperature=usual.temperature if asked.temperature is None else asked.temperature,
        top_p=usual.top_p if asked.top_p is None else asked.top_p,
        top_k=usual.top_k if asked.top_k is None else asked.top_k,
    )
    return RunItem(
        envelope.item,
        envelope.task,
        [1 + int(size_bytes / entry.profile.bytes_per_token)],
        texts=inputs.texts,
        params=structs.replace(envelope.params, generation=generation),
        chat=chat,
    )


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
