"""Hidden states of a group of sequences, and how they become one vector each.

Owns the two layouts (padded rows, or sequences end to end), pooling in float32, and the cutting of
hidden states into pieces for the vocabulary head. Numpy only: every runtime uses it alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from shoal.runtimes.sequences import Ints

Floats = npt.NDArray[np.float32]
Pooling = Literal["mean", "cls", "last", "none"]


@dataclass(frozen=True, slots=True)
class Hidden:
    """What a network gave for n sequences, float32.

    states is [n, longest, d] (rows padded on the right), [tokens, d] with `packed` (sequences end
    to end), or [n, d] where the network itself made one vector of each.
    """

    states: Floats
    lengths: Ints
    packed: bool = False

    @property
    def starts(self) -> Ints:
        """First token of each sequence in the packed layout, int64 [n]."""
        return np.cumsum(self.lengths) - self.lengths

    def rows(self, index: int) -> Floats:
        """The states of one sequence's tokens, float32 [length, d]."""
        length = int(self.lengths[index])
        if self.packed:
            start = int(self.starts[index])
            return self.states[start : start + length]
        return self.states[index, :length]

    def pool(self, kind: Pooling) -> Floats:
        """One vector for each sequence, float32 [n, d]; `none` takes them as the network made them.

        `mean` is over the real tokens, `cls` the first token, `last` the last real one.
        """
        if kind == "none":
            return self.states
        if kind == "mean":
            return np.divide(self._sums(), self.lengths[:, None], dtype=np.float32)
        offsets = np.zeros_like(self.lengths) if kind == "cls" else self.lengths - 1
        if self.packed:
            chosen: Floats = self.states[self.starts + offsets]
        else:
            chosen = self.states[np.arange(len(self.lengths)), offsets]
        return chosen

    def _sums(self) -> Floats:
        if self.packed:
            totals: Floats = np.add.reduceat(self.states, self.starts, axis=0)
            return totals
        real = np.arange(self.states.shape[1]) < self.lengths[:, None]
        sums: Floats = np.matmul(real.astype(np.float32)[:, None, :], self.states)[:, 0]
        return sums


def pieces(hidden: Hidden, max_tokens: int) -> Iterator[tuple[Sequence[int], Floats]]:
    """Cuts hidden states into rectangles [k, longest, d] of at most `max_tokens` (or one sequence).

    Yields the sequences' indices with each. A row is filled up with its own first token, which
    leaves a maximum over its tokens as it is: no mask is needed.
    """
    order = np.argsort(hidden.lengths, kind="stable")
    at = 0
    while at < len(order):
        end = at + 1
        while end < len(order) and hidden.lengths[order[end]] * (end + 1 - at) <= max_tokens:
            end += 1
        chosen = [int(index) for index in order[at:end]]
        longest = int(hidden.lengths[chosen[-1]])
        block = np.empty((len(chosen), longest, hidden.states.shape[-1]), np.float32)
        for row, index in enumerate(chosen):
            states = hidden.rows(index)
            block[row, : len(states)] = states
            block[row, len(states) :] = states[0]
        yield chosen, block
        at = end
