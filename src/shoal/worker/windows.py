"""Windows over a tokenised text that is longer than a model, and the words of its tokens.

Owns where windows begin and end, and which tokens are pieces of one word. Does not own tokenising
(`tokenise`) or how what is found in windows is put together again (`shoal.runtimes.entities`).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

Span = tuple[int, int]

# Of each window, so much is in the next one too: every token then has at least half of that as
# context on both sides in one of its windows.
_SHARED = 4


def windows(tokens: int, room: int) -> list[Span]:
    """First and end token of each window over `tokens` tokens, of `room` tokens at most.

    Neighbours share a quarter of a window; the last is moved back to be as full as the others.
    """
    room = max(room, 1)
    if tokens <= room:
        return [(0, tokens)]
    step = room - room // _SHARED
    starts = [*range(0, tokens - room, step), tokens - room]
    return [(start, start + room) for start in starts]


def word_spans(text: str, offsets: Sequence[Span], words: Sequence[int | None]) -> list[Span]:
    """For each token the characters of the word that it is a piece of.

    offsets: the characters of each token; words: the tokenizer's number of its word. Pieces belong
    together where the tokenizer says so and letters or digits touch: punctuation stands apart, as
    do the letters of scripts without case, which the tokenizers of many models never part by
    words. Spaces around a token do not count; (0, 0) stays what it is.
    """
    spans: list[Span] = []
    first = 0
    for at, (start, end) in enumerate(offsets):
        while start < end and text[start].isspace():
            start += 1  # noqa: PLW2901
        while start < end and text[end - 1].isspace():
            end -= 1  # noqa: PLW2901
        spans.append((start, end))
        goes_on = (
            at > 0
            and words[at] is not None
            and words[at] == words[at - 1]
            and spans[at - 1][1] == start < end
            and _cased(text[start - 1])
            and _cased(text[start])
        )
        if not goes_on:
            first = at
        elif first < at:
            whole = (spans[first][0], end)
            spans[first : at + 1] = [whole] * (at + 1 - first)
    return spans


def _cased(character: str) -> bool:
    """Whether it is a digit, a mark, or a letter of a script that has upper and lower case."""
    category = unicodedata.category(character)
    return category == "Nd" or (category[0] in "LM" and category != "Lo")
