"""The word that somebody probably meant.

Owns the one rule by which every message of Shoal guesses at a mistyped name. Does not own the
lists of names.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def near(word: str, known: Iterable[str], max_names: int = 3) -> list[str]:
    """The known names that look most like `word`, best first; case is no difference."""
    by_folded = {name.casefold(): name for name in known}
    close = get_close_matches(word.casefold(), by_folded, n=max_names, cutoff=0.6)
    return [by_folded[folded] for folded in close]


def did_you_mean(word: str, known: Iterable[str], max_names: int = 1) -> str:
    """A clause to put behind "unknown ...": ", did you mean `pooling`?", or an empty string."""
    names = [f"`{name}`" for name in near(word, known, max_names)]
    return f", did you mean {' or '.join(names)}?" if names else ""
