"""Attention within sequences: packed end to end, or padded rows.

Packed, no token is padding: on the CPU attention runs apart for each run of sequences of one
length; on CUDA in half precision it is one call of torch's variable-length kernel. Padded, it is
one call with a mask. Owns masks (windows, reading direction, padding), biases by distance and
rotary positions. Does not own linear maps or layers (`network`). Follows Vaswani et al. 2017,
Su et al. 2021 (rotary positions), Ainslie et al. 2023 (shared keys), Raffel et al. 2020 (distance
buckets). The CUDA path is written with care and has not been run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from shoal.runtimes.sequences import Ints
from shoal.runtimes.torch.shape import LayerShape, Shape

FAR = 128  # from this distance on, MPNet tells no distances apart


def varlen_kernel(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """Torch's attention over sequences end to end; None where there is none."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch before 2.10
        return None
    kernel: Callable[..., Tensor] = varlen_attn
    return kernel


class Attention:
    """The attention of one forward pass over a group of sequences.

    lengths: tokens of each sequence. longest: with it, sequences are rows of that many tokens,
    padded on the right; without, they lie end to end. biases: [buckets, heads], by distance.
    """

    def __init__(
        self,
        shape: Shape,
        lengths: Ints,
        positions: Tensor,
        *,
        longest: int | None,
        biases: Tensor | None,
        kernel: Callable[..., Tensor] | None = None,
    ) -> None:
        self._shape = shape
        self._lengths = lengths
        self._positions = positions
        self._longest = longest
        self._device = positions.device
        self._biases = biases
        self._kernel = kernel if longest is None and biases is None else None
        self._tokens = int(lengths.sum()) if longest is None else longest * len(lengths)
        self._angles: dict[tuple[float, ...], tuple[Tensor, Tensor]] = {}
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}
        self._ends: Tensor | None = None

    def __call__(self, layer: LayerShape, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Mixes values [rows, kv_heads * head_dim] into [rows, heads * head_dim].

        Rows after the group's tokens come out as zeros.
        """
        shape, rows = self._shape, len(query)
        q = query[: self._tokens].view(self._tokens, shape.heads, shape.head_dim)
        k, v = (
            x[: self._tokens].view(self._tokens, shape.kv_heads, shape.head_dim)
            for x in (key, value)
        )
        if layer.rope:
            cos, sin = self._rotation(layer.rope)
            q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        q, k = q.to(v.dtype), k.to(v.dtype)
        if self._kernel is not None:
            mixed = self._varlen(self._kernel, layer, q, k, v)
        else:
            if shape.kv_heads != shape.heads:
                each = shape.heads // shape.kv_heads
                k, v = (x.repeat_interleave(each, dim=1) for x in (k, v))
            mixed = self._rows(layer, q, k, v) if self._longest else self._runs(layer, q, k, v)
        return functional.pad(mixed.flatten(1), (0, 0, 0, rows - self._tokens))

    def _runs(self, layer: LayerShape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One call for each run of sequences of one length."""
        mixed = torch.empty_like(q)
        end = 0
        for length, same in groupby(self._lengths.tolist()):
            count = len(list(same))
            start, end = end, end + length * count
            mask = self._mask(length, layer.window)
            parts = (x[start:end].unflatten(0, (count, length)) for x in (q, k, v))
            mixed[start:end] = self._attend(mask, *parts)
        return mixed

    def _rows(self, layer: LayerShape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One call for all padded rows."""
        count, longest = len(self._lengths), self._longest or 0
        mask = self._mask(longest, layer.window)
        # Read from left to right, no real token sees the padding on its right.
        if int(self._lengths.min()) < longest and not self._shape.causal:
            mask = self._without_padding(mask, longest)
        parts = (x.unflatten(0, (count, longest)) for x in (q, k, v))
        return self._attend(mask, *parts)

    def _without_padding(self, mask: Tensor | None, longest: int) -> Tensor:
        """The mask [n, 1 or heads, 1 or longest, longest] that hides padding as well."""
        places = torch.arange(longest, device=self._device)
        lengths = torch.from_numpy(self._lengths).to(self._device)
        real = (places < lengths[:, None])[:, None, None]
        if mask is None:
            return real
        if mask.dtype != torch.bool:
            return mask.masked_fill(~real, -math.inf)
        # A row of padding that saw nothing would be NaN, and reach others through the next layer.
        return (mask & real) | (places == places[:, None])

    def _attend(self, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[n, tokens, heads, head_dim] each -> [n * tokens, heads, head_dim]."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mixed = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=self._shape.causal and mask is None,
            scale=self._shape.scale,
        )
        flat: Tensor = mixed.transpose(1, 2).flatten(0, 1)
        return flat

    def _varlen(
        self, kernel: Callable[..., Tensor], layer: LayerShape, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """One call for sequences end to end; its window is inclusive on both sides."""
        if self._ends is None:
            ends = np.concatenate([[0], np.cumsum(self._lengths)]).astype(np.int32)
            self._ends = torch.from_numpy(ends).to(self._device)
        longest = int(self._lengths.max())
        left = -1 if layer.window is None else layer.window
        return kernel(
            q,
            k,
            v,
            self._ends,
            self._ends,
            longest,
            longest,
            scale=self._shape.scale,
            window_size=(left, 0 if self._shape.causal else left),
            enable_gqa=self._shape.kv_heads != self._shape.heads,
        )

    def _mask(self, length: int, window: int | None) -> Tensor | None:
        """What each of `length` tokens sees, [1, 1 or heads, length, length]; None: the plain case.

        Plain is all, or what is not to the right where the model reads from left to right.
        """
        key = (length, window)
        if key not in self._masks:
            self._masks[key] = self._make_mask(length, window)
        return self._masks[key]

    def _make_mask(self, length: int, window: int | None) -> Tensor | None:
        narrow = window is not None and length - 1 > window
        if not narrow and self._biases is None:
            return None
        places = torch.arange(length, device=self._device)
        apart = places[None] - places[:, None]
        if self._biases is not None:
            bias = self._biases[_bucket(apart, len(self._biases))]
            return bias.permute(2, 0, 1)[None]
        seen = apart.abs() <= (length if window is None else window)
        return (seen & (apart <= 0) if self._shape.causal else seen)[None, None]

    def _rotation(self, rope: tuple[float, ...]) -> tuple[Tensor, Tensor]:
        """Cosines and sines of each token's position, float32 [tokens, 1, head_dim]."""
        if rope not in self._angles:
            inverse = torch.tensor(rope, device=self._device)
            angles = self._positions[:, None].float() * inverse
            angles = torch.cat((angles, angles), dim=-1)[:, None]
            self._angles[rope] = (angles.cos(), angles.sin())
        return self._angles[rope]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Vectors [tokens, heads, head_dim] turned by their positions' angles, in float32."""
    first, second = x.chunk(2, dim=-1)
    turned: Tensor = x * cos + torch.cat((-second, first), dim=-1) * sin
    return turned


def _bucket(apart: Tensor, buckets: int) -> Tensor:
    """Row of the bias table for key position - query position: half of the rows for each side.

    Half of those are for one distance each, the others grow with its logarithm up to `FAR`.
    """
    half = buckets // 2
    exact = half // 2
    distance = apart.abs()
    grown = torch.log(distance.clamp(min=1).float() / exact) / math.log(FAR / exact)
    far = (exact + (grown * (half - exact)).long()).clamp(max=half - 1)
    rows: Tensor = torch.where(distance < exact, distance, far) + (apart > 0).long() * half
    return rows
