"""The labels that a request asks for, out of those that a model has.

Owns that check and its message. Does not own what is done with the others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shoal.core.spelling import did_you_mean
from shoal.errors import InvalidRequest

_LISTED = 30


def wanted(known: Sequence[str], asked: Collection[str]) -> frozenset[str]:
    """The labels to return; none asked for means all.

    Raises `InvalidRequest` for one that the model does not have.
    """
    for label in asked:
        if label not in known:
            listed = ", ".join(known[:_LISTED]) + (", ..." if len(known) > _LISTED else "")
            raise InvalidRequest(
                f"there is no label `{label}`{did_you_mean(label, known)}; known: {listed}",
                param="labels",
            )
    return frozenset(asked or known)
