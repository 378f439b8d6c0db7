"""One transformer in plain torch, as its `Plan` says: token ids in, token vectors out.

Packed, no token is padding: linear layers see all tokens of a group as one matrix, and attention
mixes within each sequence. On most CPUs that beats rows padded to like lengths, and a batch need
not wait for company of its length. Follows Vaswani et al. 2017, and Formal et al. 2021 (SPLADE).

Owns the computation. Does not own what a family chooses (`families`), attention (`attention`),
reading tensors (`tensors`), or items (`shoal.runtimes.encoder`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from shoal.errors import ModelUnavailable, RunFailed
from shoal.ipc.messages import ModelSpec
from shoal.runtimes.adapters import AdapterFile
from shoal.runtimes.bert import Floats, read_config
from shoal.runtimes.checkpoint import read_weights
from shoal.runtimes.heads import Head
from shoal.runtimes.pooling import Hidden
from shoal.runtimes.sequences import Ints, Limits, TokenSequence, end_to_end, pad
from shoal.runtimes.torch.adapters import Adapter, Stretch, fitted, stretches
from shoal.runtimes.torch.attention import Attention, varlen_kernel
from shoal.runtimes.torch.classifiers import classifier_of
from shoal.runtimes.torch.families import find
from shoal.runtimes.torch.linear import STOCK, Linear
from shoal.runtimes.torch.shape import Config, Names, Plan, sizes
from shoal.runtimes.torch.tensors import Pair, Tensors, mapped_errors
from shoal.runtimes.torch.towers import ACTIVATIONS, Tower, normed

Parts = Mapping[str, Pair]


class TorchTransformer:
    """One loaded checkpoint. `packs` says which of the two layouts it runs; it may be set."""

    def __init__(
        self,
        weights_file: Path,
        spec: ModelSpec,
        *,
        device: str,
        linear: Linear,
        packs: bool,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if spec.pooling == "none":
            raise ModelUnavailable(f"{spec.key}: pooling none needs a graph that pools")
        values = read_config(weights_file.parent)
        plan = find(values, spec.family, spec.key).read(Config(values, spec.key))
        shape = plan.shape
        if shape.activation not in ACTIVATIONS:
            raise ModelUnavailable(
                f"{spec.key}: hidden_act {shape.activation!r} is not supported; known: "
                f"{', '.join(ACTIVATIONS)}"
            )
        self.limits = Limits(shape.positions, shape.vocab)
        self.packs = packs
        self._plan = plan
        self._shape = shape
        self._adapters: dict[str, Adapter] = {}
        self._dtype = dtype
        self._where = spec.key
        self._device = torch.device(device)
        # The trial of the faster map was in float32.
        self._linear = linear if dtype == torch.float32 else STOCK
        self._kernel = varlen_kernel(self._device, dtype)
        self._act = ACTIVATIONS[shape.activation]
        with mapped_errors(spec.key):
            tensors = Tensors(
                read_weights(weights_file, allow_pickle=spec.allow_pickle),
                plan.names.prefixes,
                where=spec.key,
                device=self._device,
                dtype=dtype,
            )
            self._read(tensors, plan.names)
            self._read_towers(tensors, plan, spec)
        self.classifier: Head | None = classifier_of(tensors, plan, values, spec)
        self.memory_bytes = tensors.nbytes + (self.classifier.nbytes if self.classifier else 0)

    def load_adapter(self, key: str, file: AdapterFile) -> int:
        """Takes an adapter, in the place of one of the same key; its bytes.

        Raises `ModelUnavailable` for one that does not fit this network.
        """
        plan = self._plan
        heads = (
            (plan.classifier, self.classifier),
            (plan.tokens, self._token_classes),
            (plan.words, self._vocabulary),
        )
        used = [names for names, head in heads if names is not None and head is not None]
        with mapped_errors(f"{self._where} with {key}"):
            adapter = fitted(file, plan, used, device=self._device, dtype=self._dtype)
        self.unload_adapter(key)
        self._adapters[key] = adapter
        self.memory_bytes += adapter.nbytes
        return adapter.nbytes

    def unload_adapter(self, key: str) -> None:
        """Forgets an adapter; one that is not there is passed over."""
        adapter = self._adapters.pop(key, None)
        self.memory_bytes -= adapter.nbytes if adapter else 0

    def _read(self, tensors: Tensors, names: Names) -> None:
        shape, wide = self._shape, self._shape.hidden
        self._words = tensors.table(names.words, shape.vocab, wide)
        self._positions = self._types = self._biases = None
        if names.positions:
            self._positions = tensors.table(names.positions, shape.position_rows, wide)
        if names.types:
            self._types = tensors.table(names.types, shape.token_types, wide)
        if names.relative:
            self._biases = tensors.table(names.relative, shape.relative_buckets, shape.heads)
        whole = {"embed_norm": names.embed_norm, "final_norm": names.final_norm}
        self._outer: Parts = {
            name: self._norm_pair(tensors.norm(part, wide)) for name, part in whole.items() if part
        }
        self._layers = [self._read_layer(tensors, names, i) for i in range(len(shape.layers))]

    def _read_layer(self, tensors: Tensors, names: Names, number: int) -> Parts:
        parts: dict[str, Pair] = {}
        for name, size in sizes(self._shape).items():
            part = names.layer.get(name)
            if part is not None and number >= part.since:
                placed = replace(part, stored=part.stored.format(i=number))
                if len(size) == 1:
                    parts[name] = self._norm_pair(tensors.norm(placed, *size))
                else:
                    parts[name] = tensors.pair(placed, *size)
        return parts

    def _norm_pair(self, pair: Pair) -> Pair:
        """A norm's weight as it multiplies."""
        offset = self._shape.norm_offset
        return Pair(pair.weight + offset, pair.bias) if offset else pair

    def _read_towers(self, tensors: Tensors, plan: Plan, spec: ModelSpec) -> None:
        """The heads over token vectors, where the checkpoint has them and the model uses them."""
        words, tokens = plan.words, plan.tokens
        self.has_vocabulary = words is not None and words.dense in tensors
        self._vocabulary: Tower | None = None
        self._token_classes: Tower | None = None
        if words is not None and self.has_vocabulary and "sparse" in spec.outputs:
            n = plan.shape.vocab
            self._vocabulary = Tower(tensors, words, n, plan.shape, plan.names.words)
        if tokens is not None and tokens.out in tensors and "extract" in spec.tasks:
            n = len(tensors.array(f"{tokens.out.stored}.weight"))
            self._token_classes = Tower(tensors, tokens, n, plan.shape)

    @property
    def varlen(self) -> bool:
        """Whether packed attention is one kernel for all sequences, whatever their lengths."""
        return self._kernel is not None and self._biases is None

    def hidden(self, group: Sequence[TokenSequence]) -> Hidden:
        """Hidden states of a group: [tokens, d] packed, or [n, longest, d] padded.

        The adapters of its sequences are loaded; it is best where those of one are side by side.
        """
        with mapped_errors(self._where), torch.inference_mode():
            return self._run(group, None)

    def token_logits(self, group: Sequence[TokenSequence]) -> list[Floats]:
        """Class logits [tokens, k] of each sequence of a group."""
        if self._token_classes is None:
            raise RunFailed(f"{self._where} was loaded without a token classifier")
        with mapped_errors(self._where), torch.inference_mode():
            logits = self._run(group, self._token_classes)
        return [logits.rows(index) for index in range(len(group))]

    def vocabulary(self, states: Floats) -> Floats:
        """SPLADE weights [n, vocab]: log(1 + relu(max over tokens of the logits))."""
        if self._vocabulary is None:
            raise RunFailed(f"{self._where} was loaded without its masked-language head")
        weight, bias = self._vocabulary.out
        with mapped_errors(self._where), torch.inference_mode():
            x = self._rounded(self._tensor(states).flatten(0, 1))
            x = self._vocabulary.features(x, self._linear).to(weight.dtype)
            # Words by tokens: the maximum then runs along memory, and the product is faster too.
            # The bias and the logarithm do not move the maximum, and come after it.
            logits = self._linear.apply(weight, x, None)
            size = (states.shape[0], states.shape[1])
            top = logits[:, : size[0] * size[1]].unflatten(1, size).amax(dim=2).T.float()
            return _numpy(torch.log1p(torch.relu(top if bias is None else top + bias)))

    def _run(self, group: Sequence[TokenSequence], tower: Tower | None) -> Hidden:
        if self.packs:
            flat = end_to_end(group)
            spans = stretches(group, None, self._adapters)
            x = self._forward(flat.ids, flat.positions, flat.types, flat.lengths, spans=spans)
            return Hidden(_numpy(self._topped(x, tower)), flat.lengths, packed=True)
        rows = pad(group, self._shape.pad_id)
        size = rows.ids.shape
        positions = np.tile(np.arange(size[1]), size[0])
        spans = stretches(group, size[1], self._adapters)
        ids, types = rows.ids.ravel(), rows.types.ravel()
        x = self._forward(ids, positions, types, rows.lengths, spans=spans, longest=size[1])
        return Hidden(_numpy(self._topped(x, tower)).reshape(*size, -1), rows.lengths)

    def _topped(self, x: Tensor, tower: Tower | None) -> Tensor:
        return x if tower is None else self._map(tower.features(x, self._linear), tower.out)

    def _forward(
        self,
        ids: Ints,
        positions: Ints,
        types: Ints,
        lengths: Ints,
        *,
        spans: Sequence[Stretch],
        longest: int | None = None,
    ) -> Tensor:
        """Token vectors [tokens, d]; ids, positions and types are [tokens]."""
        attention = Attention(
            self._shape,
            lengths,
            self._tensor(positions),
            longest=longest,
            biases=self._biases,
            kernel=self._kernel,
        )
        x = self._rounded(self._embed(ids, positions, types))
        for number in range(len(self._layers)):
            x = self._layer(x, number, attention, spans)
        x = x[: len(ids)]
        return self._norm(x, self._outer, "final_norm")

    def _embed(self, ids: Ints, positions: Ints, types: Ints) -> Tensor:
        x = self._words[self._tensor(ids)].float() * self._shape.embed_scale
        if self._types is not None:
            # Models with one type give it to both texts of a pair.
            x = x + self._types[self._tensor(types).clamp(max=len(self._types) - 1)]
        if self._positions is not None:
            x = x + self._positions[self._tensor(positions) + self._shape.position_start]
        return self._norm(x, self._outer, "embed_norm")

    def _layer(
        self, x: Tensor, number: int, attention: Attention, spans: Sequence[Stretch]
    ) -> Tensor:
        """One layer over x [tokens, d]: attention, then the feed-forward part.

        Sums and norms are float32 also where the maps are in a lower precision: it costs little,
        and most of what a lower precision loses, and all that overflows, is lost there.
        """
        layer, parts = self._shape.layers[number], self._layers[number]

        def mapped(x: Tensor, part: str) -> Tensor:
            pair = parts[part]
            x = x.to(pair.weight.dtype)
            y = self._linear.apply(x, pair.weight, pair.bias)
            for span in spans:
                span.add(y, x, number, part)
            return y

        y = self._norm(x, parts, "attention_in")
        query, key, value = (mapped(y, part) for part in "qkv")
        if "q_norm" in parts:
            query, key = self._each(query, parts, "q_norm"), self._each(key, parts, "k_norm")
        y = mapped(attention(layer, query, key, value), "o")
        x = self._norm(x + self._norm(y, parts, "attention_out"), parts, "attention_sum")
        y = self._norm(x, parts, "mlp_in")
        up = mapped(y, "up")
        inner = self._act(mapped(y, "gate")) * up if "gate" in parts else self._act(up)
        y = mapped(inner, "down")
        return self._norm(x + self._norm(y, parts, "mlp_out"), parts, "mlp_sum")

    def _map(self, x: Tensor, pair: Pair) -> Tensor:
        return self._linear.apply(x.to(pair.weight.dtype), pair.weight, pair.bias)

    def _norm(self, x: Tensor, parts: Parts, name: str) -> Tensor:
        """The norm of that name, or x as it is where the family has none there."""
        pair = parts.get(name)
        return x if pair is None else normed(x, pair, self._shape)

    def _each(self, x: Tensor, parts: Parts, name: str) -> Tensor:
        """A norm of each attention head's part of [tokens, heads * head_dim]."""
        return self._norm(x.unflatten(1, (-1, self._shape.head_dim)), parts, name).flatten(1)

    def _tensor(self, array: np.ndarray) -> Tensor:
        tensor: Tensor = torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
        return tensor

    def _rounded(self, x: Tensor) -> Tensor:
        """[n, d] with rows of zeros after it, up to a size that the linear map likes."""
        more = self._linear.rows(len(x)) - len(x)
        return functional.pad(x, (0, 0, 0, more)) if more else x


def _numpy(x: Tensor) -> Floats:
    array: Floats = x.to(dtype=torch.float32, device="cpu").numpy()
    return array
