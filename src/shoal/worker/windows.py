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
    spans = [_stripped(text, start, end) for start, end in offsets]
    first = 0
    for at in range(1, len(spans) + 1):
        if at < len(spans) and words[at] is not None and words[at] == words[at - 1]:
            start, end = spans[at]
            touches = spans[at - 1][1] == start < end
            if touches and _cased(text[start - 1]) and _cased(text[start]):
                continue
        # The word is written once, when it ends: a word may have as many pieces as a text.
        spans[first:at] = [(spans[first][0], spans[at - 1][1])] * (at - first)
        first = at
    return spans


def _stripped(text: str, start: int, end: int) -> Span:
    """A token's characters without the spaces around them."""
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end


def _cased(character: str) -> bool:
    """Whether it is a digit, a mark, or a letter of a script that has upper and lower case."""
    category = unicodedata.category(character)
    return category == "Nd" or (category[0] in "LM" and category != "Lo")
