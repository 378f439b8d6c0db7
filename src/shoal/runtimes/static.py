"""Static embeddings: a vector for each token, whatever stands around it.

Owns reading the format of Model2Vec (`embeddings` [rows, d], and where they are fewer than tokens a
`mapping` [vocab] from token to row and `weights` [vocab] of each token) and the look-up. Does not
own pooling: a text is the mean of its tokens, as for any encoder. There is no forward pass; the
table stays in the mapped file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shoal.errors import ModelUnavailable, RunFailed
from shoal.ipc.messages import ModelSpec
from shoal.runtimes.checkpoint import SafetensorsFile, Weights
from shoal.runtimes.heads import Head
from shoal.runtimes.pooling import Hidden
from shoal.runtimes.sequences import Limits, TokenSequence, end_to_end

Floats = npt.NDArray[np.float32]


class StaticNetwork:
    """A table of token vectors. Raises `ModelUnavailable` where the file holds none."""

    packs = True
    has_vocabulary = False
    classifier: Head | None = None

    def __init__(self, weights_file: Path, spec: ModelSpec) -> None:
        file = SafetensorsFile(weights_file)
        if "embeddings" not in file or file["embeddings"].ndim != 2:
            raise ModelUnavailable(f"{spec.key}: {weights_file} holds no table `embeddings`")
        self._table = file["embeddings"]
        self._rows = _column(file, "mapping", spec)
        self._weights = _column(file, "weights", spec)
        tokens = len(self._table) if self._rows is None else len(self._rows)
        if self._weights is not None and len(self._weights) != tokens:
            raise ModelUnavailable(f"{spec.key}: `weights` are not one for each of {tokens} tokens")
        if self._rows is not None and not 0 <= self._rows.min() <= self._rows.max() < len(
            self._table
        ):
            raise ModelUnavailable(f"{spec.key}: `mapping` leads out of the table")
        self.limits = Limits(spec.max_tokens, tokens)
        arrays = (self._table, self._rows, self._weights)
        self.memory_bytes = sum(array.nbytes for array in arrays if array is not None)

    def hidden(self, group: Sequence[TokenSequence]) -> Hidden:
        """The tokens' vectors [tokens, d], end to end."""
        flat = end_to_end(group)
        rows = flat.ids if self._rows is None else self._rows[flat.ids]
        vectors = self._table[rows].astype(np.float32)
        if self._weights is not None:
            vectors *= self._weights[flat.ids].astype(np.float32)[:, None]
        return Hidden(vectors, flat.lengths, packed=True)

    def vocabulary(self, states: Floats) -> Floats:
        """A table predicts no words."""
        raise RunFailed(f"a table gives no sparse vectors for {states.shape}")

    def token_logits(self, group: Sequence[TokenSequence]) -> list[Floats]:
        """A table tells no tokens apart."""
        raise RunFailed(f"a table classifies no tokens, {len(group)} texts were given")


def _column(file: SafetensorsFile, name: str, spec: ModelSpec) -> Weights | None:
    if name not in file:
        return None
    column = file[name]
    if column.ndim != 1 or not len(column):
        raise ModelUnavailable(f"{spec.key}: `{name}` has one number for each token, in one axis")
    return column
