"""Which of several runtimes serves a model on a worker.

Pure: it is told what each of them is said to cost and why one cannot serve, and says which one
does. Owns the order and the margin. Does not own what is installed, measured or broken
(`shoal.worker.choice`), nor when to ask: an answer holds while the model is served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# What another must save before it goes ahead of one that stands before it. Costs that were taken
# at other times, or on another machine, differ by some tenths without meaning anything.
MARGIN = 1.25


@dataclass(frozen=True, slots=True)
class Candidate:
    """A runtime that could serve a model.

    why_not: why it cannot; None: it can. token_s: device seconds of a token, as measured here or
    else as declared; 0 while unknown. lacks: what it cannot do of what is wanted of the model; that
    counts where another can.
    """

    runtime: str
    why_not: str | None = None
    token_s: float = 0.0
    lacks: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The runtime that serves, and of each other one why it does not.

    why_not: of the chosen one, where none of them can serve; it is the first then.
    """

    runtime: str
    others: dict[str, str]
    why_not: str | None = None


def choose(candidates: Sequence[Candidate], serving: str | None = None) -> Choice:
    """The first that can serve, unless a later one is known to be cheaper by the margin.

    Where some can do all that is wanted, it is one of those.

    candidates: in the order of the entry, at least one. serving: the one that serves now, which
    counts as the first of those that can.
    """
    able = [one for one in candidates if one.why_not is None]
    able = [one for one in able if one.lacks is None] or able
    able.sort(key=lambda one: one.runtime != serving)
    best = able[0] if able else candidates[0]
    for one in able[1:]:
        if one.token_s and best.token_s and one.token_s * MARGIN < best.token_s:
            best = one
    others = {one.runtime: _why(one, best) for one in candidates if one != best}
    return Choice(best.runtime, others, best.why_not)


def _why(one: Candidate, best: Candidate) -> str:
    lacks = one.lacks if best.lacks is None else None
    return one.why_not or lacks or _behind(one, best)


def _behind(one: Candidate, best: Candidate) -> str:
    if not (one.token_s and best.token_s):
        return f"stands after {best.runtime}, and the two were not compared"
    times = one.token_s / best.token_s
    if times >= 1.0:
        return f"takes {times:.2f} times what {best.runtime} takes"
    return f"takes {times:.2f} times what {best.runtime} takes, which is too little less"
