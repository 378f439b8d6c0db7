"""LoRA adapters of a loaded network: which of its maps each pair belongs to, and adding the pairs.

The rows of one adapter lie side by side, so that what it adds is two small products over a stretch
of rows, into the numbers that one product of the base has made for the whole batch. Gathering rows
costs two to four times as much on top of the base, and one product of all adapters with a mask
grows with their number. Owns finding the map of every module that an adapter names (parts of fused
matrices take their rows of the pair's second half), the checks against the network, and that
addition. Does not own reading a folder (`shoal.runtimes.adapters`) or the network.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from shoal.errors import ModelUnavailable
from shoal.runtimes.adapters import AdapterFile
from shoal.runtimes.sequences import TokenSequence
from shoal.runtimes.torch.shape import HeadNames, Part, Plan, sizes
from shoal.runtimes.torch.tensors import canonical

_MAPS = ("q", "k", "v", "o", "gate", "up", "down")
# A map over the first token, which checkpoints of encoders have and only classifiers read.
_POOLER = "pooler.dense"


class Halves(NamedTuple):
    """What one map adds: a [rank, in], b [out, rank]."""

    a: Tensor
    b: Tensor


class Place(NamedTuple):
    """A map of the network; block as in `Part`."""

    layer: int
    part: str
    block: tuple[int, int]


class Adapter:
    """One adapter on the network's device. nbytes counts what several maps share once."""

    def __init__(self, layers: Sequence[Mapping[str, Halves]]) -> None:
        self.layers = layers
        kept = {
            (half.data_ptr(), half.nbytes)
            for layer in layers
            for halves in layer.values()
            for half in halves
        }
        self.nbytes: int = sum(size for _, size in kept)


class Stretch(NamedTuple):
    """Rows of a batch, from start to end, that one adapter changes."""

    start: int
    end: int
    adapter: Adapter

    def add(self, y: Tensor, x: Tensor, layer: int, part: str) -> None:
        """Adds to y [rows, out] what the adapter makes of x [rows, in], if it adapts this map."""
        halves = self.adapter.layers[layer].get(part)
        if halves is not None:
            low = functional.linear(x[self.start : self.end], halves.a)
            y[self.start : self.end].addmm_(low, halves.b.T)


def stretches(
    group: Sequence[TokenSequence], longest: int | None, adapters: Mapping[str, Adapter]
) -> list[Stretch]:
    """The rows of each adapter, for sequences end to end or in rows of the longest's length."""
    found: list[Stretch] = []
    end = 0
    for sequence in group:
        start, end = end, end + (longest or len(sequence))
        if not sequence.adapter:
            continue
        adapter = adapters[sequence.adapter]
        if found and found[-1].end == start and found[-1].adapter is adapter:
            start = found.pop().start
        found.append(Stretch(start, end, adapter))
    return found


def fitted(
    file: AdapterFile,
    plan: Plan,
    heads: Collection[HeadNames],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Adapter:
    """An adapter's pairs at the network's maps. heads: those over its vectors that it computes.

    Raises `ModelUnavailable` for a pair that has no map here, or one of another shape, and for a
    map that the config means and that has no pair.
    """
    where = file.config.where
    computed = set(_names(heads))
    idle = {_POOLER, *_names(h for h in (plan.classifier, plan.tokens, plan.words) if h)} - computed
    names = {canonical(name, plan.names.prefixes): name for name in file.pairs}
    if len(names) < len(file.pairs):
        raise ModelUnavailable(f"{where}: it names a module twice, with and without a prefix")
    table = _table(plan, names)
    layers: list[dict[str, Halves]] = [{} for _ in plan.shape.layers]
    size = sizes(plan.shape)
    used = ""
    for name, stored in names.items():
        if name in idle:
            continue
        if name in computed:
            raise ModelUnavailable(f"{where}: {stored} is of a head, and heads take no adapters")
        if name not in table:
            raise ModelUnavailable(f"{where}: {stored} is no linear map of the model")
        used = stored.removesuffix(name)
        rows, width = size[table[name][0].part]
        want = (rows * table[name][0].block[1], width)
        a, b = _on_device(file, stored, want, device=device, dtype=dtype)
        for layer, part, (k, _) in table[name]:
            layers[layer][part] = Halves(a, b[k * rows : (k + 1) * rows])
    if not any(layers):
        raise ModelUnavailable(f"{where}: it adapts nothing that the model computes")
    for name in table:
        if name not in names and file.config.targets(used + name):
            raise ModelUnavailable(f"{where}: half an adapter: it has no pair for {used}{name}")
    return Adapter(layers)


def _names(heads: Iterable[HeadNames]) -> Iterator[str]:
    """The linear maps of heads."""
    for head in heads:
        yield from (part.stored for part in (head.dense, head.out) if part is not None)


def _table(plan: Plan, names: Collection[str]) -> dict[str, list[Place]]:
    """The maps of the layers by module, named as the adapter names them."""
    tables = [_places(plan, layer) for layer in (plan.names.modules, plan.names.layer)]
    return next((table for table in tables if not table.keys().isdisjoint(names)), tables[-1])


def _places(plan: Plan, layer: Mapping[str, Part]) -> dict[str, list[Place]]:
    table: dict[str, list[Place]] = {}
    for number in range(len(plan.shape.layers)):
        for name in _MAPS:
            part = layer.get(name)
            if part is not None:
                place = Place(number, name, part.block)
                table.setdefault(part.stored.format(i=number), []).append(place)
    return table


def _on_device(
    file: AdapterFile,
    stored: str,
    want: tuple[int, int],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Halves:
    """A pair as tensors. want: [out, in] of the model's map; fused, of the whole matrix."""
    pair = file.pairs[stored]
    have = (len(pair.b), pair.a.shape[1])
    if have != want:
        raise ModelUnavailable(
            f"{file.config.where}: {stored} is made for a map of {have}, the model's is {want}: "
            "the adapter is of another base"
        )
    halves = Halves(*(torch.from_numpy(half).to(device, dtype) for half in (pair.a, pair.b)))
    if not all(bool(half.isfinite().all()) for half in halves):
        raise ModelUnavailable(f"{file.config.where}: {stored} has numbers too large for {dtype}")
    return halves
