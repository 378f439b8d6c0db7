"""Which sequences of an item belong to which of its inputs, and an item of one input alone.

Owns that count, for every layout of `RunItem`, and how the errors of a sequence name its input.
Does not own what may be wrong with a sequence (`sequences`, the runtimes) or when an item is taken
apart (`host`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from msgspec import structs

from shoal.errors import InputTooLong, RunFailed
from shoal.ipc.messages import RunItem

_OFFSET_BYTES = 8


def input_of(item: RunItem, index: int) -> int | None:
    """The input that the sequence at `index` is, or is a part of; None: it is the query."""
    if item.owners:
        return item.owners[index]
    if item.layout == "shared":
        return index - 1 if index else None
    return index // 2 if item.layout == "pairs" else index


def fault(item: RunItem, index: int) -> tuple[str, dict[str, Any]]:
    """What a person calls the sequence at `index`, and the fields of an error that is about it."""
    at = input_of(item, index)
    return ("the query", {"param": "query"}) if at is None else ("the input", {"input_index": at})


def too_long(item: RunItem, index: int, tokens: int, most: int) -> InputTooLong:
    """The refusal of the sequence at `index`, as the worker words it where it counts itself."""
    what, about = fault(item, index)
    return InputTooLong(
        f"{what} has {tokens} tokens and the model takes {most}; shorten it or set "
        "`truncate` to true",
        **about,
    )


def not_finite(item: RunItem, index: int, key: str) -> RunFailed:
    """The failure of the sequence at `index`, of which a model computed what is no number."""
    what, about = fault(item, index)
    return RunFailed(f"{key}: {what} gave numbers that are not finite", **about)


def alone(item: RunItem) -> list[RunItem]:
    """An item for each input, in order; the query goes with every document."""
    always: list[int] = []
    parts: dict[int, list[int]] = {}
    for index in range(len(item.lengths)):
        at = input_of(item, index)
        if at is None:
            always.append(index)
        else:
            parts.setdefault(at, []).append(index)
    return [_only(item, [*always, *part]) for _, part in sorted(parts.items())]


def _only(item: RunItem, kept: Sequence[int]) -> RunItem:
    starts = list(accumulate(item.lengths, initial=0))

    def stretches(block: bytes, width_bytes: int) -> bytes:
        return b"".join(block[starts[i] * width_bytes : starts[i + 1] * width_bytes] for i in kept)

    return structs.replace(
        item,
        lengths=[item.lengths[i] for i in kept],
        ids=stretches(item.ids, item.id_bytes),
        offsets=stretches(item.offsets, _OFFSET_BYTES),
        second_at=[item.second_at[i] for i in kept] if item.second_at else [],
        texts=[item.texts[i] for i in kept] if item.texts else [],
        blobs=[item.blobs[i] for i in kept] if item.blobs else [],
        owners=[0] * len(kept) if item.owners else [],
    )
