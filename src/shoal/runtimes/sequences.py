"""Token sequences on their way into a network.

Owns cutting an item's block of ids into sequences, the checks of each, and padding a group of
them into rectangular arrays. Does not own which sequences run together
(`shoal.core.batching.partition`) or what their numbers become (`encoder`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.errors import InputTooLong, InvalidRequest
from shoal.ipc.messages import RunItem
from shoal.runtimes.inputs import fault

Ints = npt.NDArray[np.int64]
Places = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One sequence of ids (little-endian, `id_bytes` each); the rest as in `RunItem`.

    Equal sequences are equal objects, so that a batch can run them once.
    """

    raw: bytes
    id_bytes: int
    second_at: int = 0
    adapter: str = ""

    def __len__(self) -> int:
        return len(self.raw) // self.id_bytes

    @property
    def ids(self) -> npt.NDArray[np.uint16] | npt.NDArray[np.uint32]:
        """The ids, unsigned [n]."""
        return np.frombuffer(self.raw, "<u2" if self.id_bytes == 2 else "<u4")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a network takes: sequences of 1..`tokens` ids, each below `vocab` (0: unknown).

    least: tokens that it computes for a shorter one, too.
    """

    tokens: int
    vocab: int = 0
    least: int = 1


def cut(item: RunItem, limits: Limits) -> list[TokenSequence]:
    """The sequences of an item.

    Raises `InputTooLong` or `InvalidRequest`, naming the input, when one of them cannot be run.
    """
    if item.id_bytes not in (2, 4) or sum(item.lengths) * item.id_bytes != len(item.ids):
        raise InvalidRequest(f"item {item.item}: its ids and lengths do not fit each other")
    if item.second_at and len(item.second_at) != len(item.lengths):
        raise InvalidRequest(f"item {item.item}: second_at does not cover its sequences")
    sequences: list[TokenSequence] = []
    end = 0
    for index, length in enumerate(item.lengths):
        start, end = end, end + length * item.id_bytes
        second_at = item.second_at[index] if item.second_at else 0
        sequence = TokenSequence(item.ids[start:end], item.id_bytes, second_at, item.adapter)
        _check(sequence, index, item, limits)
        sequences.append(sequence)
    return sequences


def _check(sequence: TokenSequence, index: int, item: RunItem, limits: Limits) -> None:
    length = len(sequence)
    what, about = fault(item, index)
    if length > limits.tokens:
        raise InputTooLong(f"{what} has {length} tokens, the model takes {limits.tokens}", **about)
    if not length or not 0 <= sequence.second_at <= length:
        raise InvalidRequest(f"{what} has no tokens", **about)
    if limits.vocab and int(sequence.ids.max()) >= limits.vocab:
        raise InvalidRequest(
            f"{what} has token id {int(sequence.ids.max())}, "
            f"the vocabulary ends at {limits.vocab - 1}",
            **about,
        )


def places(item: RunItem) -> list[Places]:
    """What `RunItem.offsets` says of each sequence's tokens: first and end character, [n, 2].

    Raises `InvalidRequest` where it does not cover them.
    """
    if len(item.offsets) != 8 * sum(item.lengths):
        raise InvalidRequest(f"item {item.item}: its offsets and lengths do not fit each other")
    flat = np.frombuffer(item.offsets, "<u4").reshape(-1, 2)
    return np.split(flat, np.cumsum(item.lengths)[:-1])


@dataclass(frozen=True, slots=True)
class Padded:
    """Sequences as rows, padded on the right: int64 [n, longest] each.

    mask is 1 at real tokens; types is 1 from the second text of a pair on.
    """

    ids: Ints
    mask: Ints
    types: Ints
    lengths: Ints


def pad(sequences: Sequence[TokenSequence], pad_id: int) -> Padded:
    """Lays sequences out as rows of the longest's length."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    size = (len(sequences), int(lengths.max()))
    ids = np.full(size, pad_id, np.int64)
    types = np.zeros(size, np.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence.ids
        if sequence.second_at:
            types[row, sequence.second_at : len(sequence)] = 1
    mask = (np.arange(size[1]) < lengths[:, None]).astype(np.int64)
    return Padded(ids, mask, types, lengths)


@dataclass(frozen=True, slots=True)
class Flat:
    """Sequences end to end without padding, int64 [tokens] each (lengths [n])."""

    ids: Ints
    positions: Ints
    types: Ints
    lengths: Ints


def end_to_end(sequences: Sequence[TokenSequence]) -> Flat:
    """Lays sequences out one after the other."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    positions = np.arange(int(lengths.sum())) - starts
    # A sequence that is no pair has its second text beyond its end: no token is of type 1.
    seconds = np.array([sequence.second_at or len(sequence) for sequence in sequences], np.int64)
    types = (positions >= np.repeat(seconds, lengths)).astype(np.int64)
    ids = np.concatenate([sequence.ids for sequence in sequences]).astype(np.int64)
    return Flat(ids, positions, types, lengths)
