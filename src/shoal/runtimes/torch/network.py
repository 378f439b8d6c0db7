"""The BERT family in plain torch, float32: padded rows, or sequences packed end to end.

Packed, no token is padding: linear layers see all tokens of a group as one matrix, and attention
runs apart for each run of sequences of one length. On a CPU that beats rows padded to like lengths,
and a batch need not wait for company of its length. On CUDA, where each small attention call costs
a launch, rows are padded. Follows Devlin et al. 2018 (BERT) and Formal et al. 2021 (SPLADE).

Owns the computation. Does not own items (`shoal.runtimes.encoder`) or the checkpoint's names
(`shoal.runtimes.bert`). The CUDA path is written with care and has not been run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from shoal.errors import ModelUnavailable, OutOfMemory, RunFailed
from shoal.ipc.messages import ModelSpec
from shoal.runtimes.bert import (
    MLM_DECODER,
    MLM_NORM,
    MLM_TRANSFORM,
    POSITIONS,
    TYPES,
    WORDS,
    BertShape,
    BertWeights,
    Floats,
    classifier_of,
    expected,
    expected_vocabulary,
    read_config,
)
from shoal.runtimes.checkpoint import SafetensorsFile
from shoal.runtimes.heads import Head
from shoal.runtimes.pooling import Hidden
from shoal.runtimes.sequences import Limits, TokenSequence, end_to_end, pad
from shoal.runtimes.torch.linear import Linear

_tanh_gelu = partial(functional.gelu, approximate="tanh")
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
    "tanh": torch.tanh,
}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class TorchBert:
    """One loaded checkpoint. `packs` says which of the two layouts it runs."""

    def __init__(
        self, weights_file: Path, spec: ModelSpec, *, device: str, linear: Linear, packs: bool
    ) -> None:
        config = read_config(weights_file.parent)
        shape = BertShape.read(config, spec.key)
        file = SafetensorsFile(weights_file)
        weights = BertWeights(file, shape)
        if spec.pooling == "none":
            raise ModelUnavailable(f"{spec.key}: pooling none needs a graph that pools")
        self.limits = Limits(shape.positions, shape.vocab)
        self.packs = packs
        self.classifier: Head | None = classifier_of(weights, shape, config, spec)
        self.has_vocabulary = weights.has_vocabulary
        self._where = spec.key
        self._shape = shape
        self._device = torch.device(device)
        self._linear = linear
        self._act = _ACTIVATIONS[shape.activation]
        wanted = list(expected(shape))
        self._expands = "sparse" in spec.outputs and weights.has_vocabulary
        if self._expands:
            wanted += expected_vocabulary(shape)
        # On the CPU the tensors lie on the mapped file itself: nothing is copied, and processes
        # that load the same checkpoint share its pages.
        arrays = {name: weights[name] for name in wanted}
        with _mapped_errors(spec.key):
            self._weights = {
                name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()
            }
        distinct = {array.ctypes.data: array.nbytes for array in arrays.values()}
        self.memory_bytes = sum(distinct.values())
        if self.classifier is not None:
            self.memory_bytes += self.classifier.nbytes

    def hidden(self, group: Sequence[TokenSequence]) -> Hidden:
        """Hidden states of a group: [tokens, d] packed, or [n, longest, d] padded."""
        with _mapped_errors(self._where), torch.inference_mode():
            return self._packed(group) if self.packs else self._padded(group)

    def vocabulary(self, states: Floats) -> Floats:
        """SPLADE weights [n, vocab]: log(1 + relu(max over tokens of the logits))."""
        if not self._expands:
            raise RunFailed(f"{self._where} was loaded without its masked-language head")
        with _mapped_errors(self._where), torch.inference_mode():
            x = self._rounded(self._tensor(states).flatten(0, 1))
            x = self._act(self._map(x, MLM_TRANSFORM))
            x = self._norm(x, MLM_NORM)
            # Words by tokens: the maximum then runs along memory, and the product is faster too.
            # The bias and the logarithm do not move the maximum, and come after it.
            logits = self._linear.apply(self._weights[f"{MLM_DECODER}.weight"], x, None)
            size = (states.shape[0], states.shape[1])
            top = logits[:, : size[0] * size[1]].unflatten(1, size).amax(dim=2).T
            return _numpy(torch.log1p(torch.relu(top + self._weights[f"{MLM_DECODER}.bias"])))

    def _packed(self, group: Sequence[TokenSequence]) -> Hidden:
        flat = end_to_end(group)
        runs = [(length, len(list(same))) for length, same in groupby(flat.lengths.tolist())]
        x = self._embed(flat.ids, flat.positions, flat.types)
        x = self._layers(x, partial(self._attend_runs, runs))
        return Hidden(_numpy(x), flat.lengths, packed=True)

    def _padded(self, group: Sequence[TokenSequence]) -> Hidden:
        rows = pad(group, self._shape.pad_id)
        size = rows.ids.shape
        positions = np.tile(np.arange(size[1]), (size[0], 1))
        x = self._embed(rows.ids, positions, rows.types).flatten(0, 1)
        mask = None
        if int(rows.lengths.min()) < size[1]:
            mask = torch.from_numpy(rows.mask.astype(np.bool_)).to(self._device)[:, None, None]
        x = self._layers(x, partial(self._attend_rows, size, mask))
        return Hidden(_numpy(x).reshape(*size, -1), rows.lengths)

    def _tensor(self, array: np.ndarray) -> Tensor:
        tensor: Tensor = torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
        return tensor

    def _embed(self, ids: np.ndarray, positions: np.ndarray, types: np.ndarray) -> Tensor:
        x = self._weights[WORDS][self._tensor(ids)]
        x = x + self._weights[TYPES][self._tensor(types)]
        x = x + self._weights[POSITIONS][self._tensor(positions)]
        return self._norm(x, "embeddings.LayerNorm")

    def _layers(self, x: Tensor, attend: Attention) -> Tensor:
        """All encoder layers over x [tokens, d]; `attend` mixes within each sequence."""
        tokens = len(x)
        x = self._rounded(x)
        for layer in range(self._shape.layers):
            at = f"encoder.layer.{layer}"
            query, key, value = (
                self._map(x, f"{at}.attention.self.{part}") for part in ("query", "key", "value")
            )
            mixed = self._map(attend(query, key, value), f"{at}.attention.output.dense")
            x = self._norm(mixed + x, f"{at}.attention.output.LayerNorm")
            inner = self._act(self._map(x, f"{at}.intermediate.dense"))
            x = self._norm(self._map(inner, f"{at}.output.dense") + x, f"{at}.output.LayerNorm")
        return x[:tokens]

    def _rounded(self, x: Tensor) -> Tensor:
        """[n, d] with rows of zeros after it, up to a size that the linear map likes."""
        more = self._linear.rows(len(x)) - len(x)
        return functional.pad(x, (0, 0, 0, more)) if more else x

    def _attend_runs(
        self, runs: Sequence[tuple[int, int]], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Attention of packed sequences: one call for each run of sequences of one length."""
        mixed = torch.zeros_like(query)
        end = 0
        for length, count in runs:
            start, end = end, end + length * count
            parts = (x[start:end] for x in (query, key, value))
            mixed[start:end] = self._attend((count, length), None, *parts)
        return mixed

    def _attend_rows(
        self,
        size: tuple[int, int],
        mask: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """Attention of padded rows, in one call."""
        real = size[0] * size[1]
        parts = (x[:real] for x in (query, key, value))
        return functional.pad(self._attend(size, mask, *parts), (0, 0, 0, len(query) - real))

    def _attend(
        self, size: tuple[int, int], mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Attention within the rows of [n * tokens, d], seen as [n, heads, tokens, d / heads]."""
        shape = (*size, self._shape.attention_heads, self._shape.head_dim)
        q, k, v = (x.view(shape).transpose(1, 2) for x in (query, key, value))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        flat: Tensor = mixed.transpose(1, 2).reshape(size[0] * size[1], -1)
        return flat

    def _map(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return self._linear.apply(x, weight, bias)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        normed: Tensor = functional.layer_norm(x, weight.shape, weight, bias, self._shape.norm_eps)
        return normed


@contextmanager
def _mapped_errors(where: str) -> Iterator[None]:
    """Turns torch's errors into ours; its CPU allocator has no class of error of its own."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise OutOfMemory(f"{where}: no memory left on the device") from error
        raise RunFailed(f"{where}: {error}") from error


def _numpy(x: Tensor) -> Floats:
    array: Floats = x.to(dtype=torch.float32, device="cpu").numpy()
    return array
