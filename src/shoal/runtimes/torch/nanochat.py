"""Classifiers with nanochat's layers, read both ways: token ids in, the logits of each text out.

It is no choice of the general transformer: what a layer adds is added to a mixture of the stream
and of the words, whose shares are learnt; norms have no weights; queries and keys are turned by
rounded angles; and the feed-forward part is squared (So et al. 2021). The network was trained
on texts that are filled up to one length with a padding token, and its attention sees that filling:
without it other scores come out. So every text is computed at full length here, too, and only its
mean is of its own tokens.

Options, for what the tensors of such a checkpoint do not say:

    heads    attention heads of a layer
    fill_id  id of the token that fills a text up to `max_tokens`

Owns this network, in float32. Does not own the steps of a batch (`shoal.runtimes.encoder`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from shoal.errors import ModelUnavailable, RunFailed
from shoal.ipc.messages import ModelSpec
from shoal.runtimes.bert import labels_of, positive_of
from shoal.runtimes.checkpoint import read_weights
from shoal.runtimes.heads import Head, called
from shoal.runtimes.pooling import Hidden
from shoal.runtimes.sequences import Limits, TokenSequence
from shoal.runtimes.torch.linear import Linear
from shoal.runtimes.torch.shape import Part
from shoal.runtimes.torch.tensors import Pair, Tensors, mapped_errors

Floats = npt.NDArray[np.float32]

# Texts of full length that run as one: more of them only take more memory.
_BLOCK = 8
_THETA = 10_000.0
_PARTS = ("attn.c_q", "attn.c_k", "attn.c_v", "attn.c_proj")


class NanochatClassifier:
    """One loaded checkpoint. Raises `ModelUnavailable` for options that do not fit its tensors."""

    packs = False
    has_vocabulary = False

    def __init__(self, weights_file: Path, spec: ModelSpec, *, device: str, linear: Linear) -> None:
        if spec.pooling != "none":
            raise ModelUnavailable(f"{spec.key}: this network pools by itself: pooling is none")
        self._where = spec.key
        self._device = torch.device(device)
        self._map = linear.apply
        with mapped_errors(spec.key):
            tensors = Tensors(
                read_weights(weights_file, allow_pickle=spec.allow_pickle),
                ("model_state_dict.",),
                where=spec.key,
                device=self._device,
                dtype=torch.float32,
            )
            vocab, wide = tensors.array("transformer.wte.weight").shape
            self._heads = _option(spec, "heads", 1, wide)
            if wide % (2 * self._heads):
                raise ModelUnavailable(f"{spec.key}: option heads does not divide {wide} numbers")
            self._fill_id = _option(spec, "fill_id", 0, vocab - 1)
            self._read(tensors, vocab, wide)
            self._cos, self._sin = self._turns(spec.max_tokens, wide // self._heads)
        self.limits = Limits(spec.max_tokens, vocab, least=spec.max_tokens)
        self.memory_bytes = tensors.nbytes
        labels = called(labels_of({}, len(self._out.weight)), spec.labels, spec.key)
        # What `hidden` returns are logits already.
        self.classifier: Head | None = Head((), labels, positive=positive_of(labels, spec))

    def _read(self, tensors: Tensors, vocab: int, wide: int) -> None:
        count = len(tensors.array("resid_lambdas"))
        self._words = tensors.table("transformer.wte", vocab, wide)
        self._kept = tensors.vector("resid_lambdas", count).tolist()
        self._words_again = tensors.vector("x0_lambdas", count).tolist()
        self._layers: list[list[Tensor]] = []
        for at in (f"transformer.h.{i}" for i in range(count)):
            inner = len(tensors.array(f"{at}.mlp.c_fc.weight"))
            maps = [(part, wide, wide) for part in _PARTS]
            maps += [("mlp.c_fc", inner, wide), ("mlp.c_proj", wide, inner)]
            self._layers.append(
                [tensors.pair(Part(f"{at}.{part}", bias=False), *size)[0] for part, *size in maps]
            )
        self._norm = tensors.norm(Part("cls_norm"), wide)
        classes = len(tensors.array("cls_head.bias"))
        self._out: Pair = tensors.pair(Part("cls_head"), classes, wide)

    def _turns(self, length: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of each position's angles, [length, 1, head_dim / 2] each.

        Rounded as they were when the network was trained (Su et al. 2021).
        """
        pairs = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        angles = torch.outer(torch.arange(length, dtype=torch.float32), 1.0 / _THETA**pairs)
        cos, sin = (x.bfloat16().float().to(self._device) for x in (angles.cos(), angles.sin()))
        return cos[:, None], sin[:, None]

    def hidden(self, group: Sequence[TokenSequence]) -> Hidden:
        """Logits [n, classes] of a group, which the network has pooled by itself."""
        lengths = np.array([len(sequence) for sequence in group], np.int64)
        blocks = [group[at : at + _BLOCK] for at in range(0, len(group), _BLOCK)]
        with mapped_errors(self._where), torch.inference_mode():
            logits = [self._forward(block).cpu().numpy() for block in blocks]
        return Hidden(np.concatenate(logits), lengths)

    def vocabulary(self, states: Floats) -> Floats:  # noqa: ARG002 - the contract's
        """It has no masked-language head: raises `RunFailed`."""
        raise RunFailed(f"{self._where} gives no sparse vectors")

    def token_logits(self, group: Sequence[TokenSequence]) -> list[Floats]:  # noqa: ARG002
        """It classifies no tokens: raises `RunFailed`."""
        raise RunFailed(f"{self._where} classifies no tokens")

    def _forward(self, block: Sequence[TokenSequence]) -> Tensor:
        ids = np.full((len(block), len(self._cos)), self._fill_id, np.int64)
        own = np.zeros(ids.shape, np.float32)
        for row, sequence in enumerate(block):
            ids[row, : len(sequence)] = sequence.ids
            own[row, : len(sequence)] = 1 / len(sequence)
        words = x = _normed(self._words[torch.from_numpy(ids).to(self._device)])
        for kept, again, maps in zip(self._kept, self._words_again, self._layers, strict=True):
            x = self._layer(kept * x + again * words, maps)
        shares = torch.from_numpy(own).to(self._device)
        mean = torch.matmul(shares[:, None], _normed(x))[:, 0]
        normed = functional.layer_norm(mean, self._norm.weight.shape, *self._norm)
        return functional.linear(normed, *self._out)

    def _layer(self, x: Tensor, maps: Sequence[Tensor]) -> Tensor:
        """One layer over x [n, tokens, d]: attention, then the feed-forward part."""
        y = _normed(x)
        query, key, value = (
            self._map(y, weight, None).unflatten(-1, (self._heads, -1)) for weight in maps[:3]
        )
        query, key = _normed(self._turned(query)), _normed(self._turned(key))
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        )
        x = x + self._map(mixed.transpose(1, 2).flatten(2), maps[3], None)
        inner = functional.relu(self._map(_normed(x), maps[4], None)).square()
        return x + self._map(inner, maps[5], None)

    def _turned(self, x: Tensor) -> Tensor:
        """Vectors [n, tokens, heads, head_dim] turned by their positions' angles, backwards."""
        first, second = x.chunk(2, dim=-1)
        parts = first * self._cos + second * self._sin, second * self._cos - first * self._sin
        return torch.cat(parts, dim=-1)


def _normed(x: Tensor) -> Tensor:
    """RMS norm (Zhang and Sennrich 2019) of the last axis, without weights."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps)


def _option(spec: ModelSpec, name: str, least: int, most: int) -> int:
    value = spec.options.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ModelUnavailable(f"{spec.key}: option {name} is a number from {least} to {most}")
    return value
