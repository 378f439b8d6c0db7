"""A request becomes items of bounded cost.

Owns the cuts. Does not own the estimate of cost or the items' contents.
"""

from __future__ import annotations

from collections.abc import Sequence


def spans(
    costs_tokens: Sequence[int],
    *,
    shared_tokens: int,
    max_tokens: int,
    max_inputs: int,
) -> list[tuple[int, int]]:
    """Consecutive (start, end) spans of the inputs, each within both bounds.

    `shared_tokens` is what every input costs besides its own (a query that is read with each
    document). An input over the bound is a span of its own: it cannot be cut.
    """
    cuts: list[tuple[int, int]] = []
    start, tokens = 0, 0
    for at, own_tokens in enumerate(costs_tokens):
        cost_tokens = own_tokens + shared_tokens
        if at > start and (tokens + cost_tokens > max_tokens or at - start >= max_inputs):
            cuts.append((start, at))
            start, tokens = at, 0
        tokens += cost_tokens
    if costs_tokens:
        cuts.append((start, len(costs_tokens)))
    return cuts
