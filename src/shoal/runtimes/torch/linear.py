"""The linear map x @ W.T (+ b) on this machine: torch's own, or oneDNN's where that is faster.

On some CPUs torch's default library does not use the widest instructions and oneDNN is twice as
fast; on others they are alike. The operator that reaches oneDNN directly is private to torch, so it
is used only where a short trial finds it there, equal in its numbers, and clearly faster: it keeps
half a megabyte of code for every number of rows it meets, so rows must be rounded up to few sizes.
Owns that trial and the rounding. Does not own what is mapped (`network`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_ROWS, _IN, _OUT = 256, 384, 1536
_TRIALS = 5
_GAIN = 1.2
_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Linear:
    """A way to compute x @ W.T (+ b). few_sizes: the number of rows is better a round one."""

    apply: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    few_sizes: bool = False

    def rows(self, needed: int) -> int:
        """How many rows to compute where `needed` are: multiples of 32, of 256 from 1024 on."""
        if not self.few_sizes:
            return needed
        step = 32 if needed <= 1024 else 256
        return -(-needed // step) * step


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    operator = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 # nothing public reaches it
    mapped: Tensor = operator(x, weight, bias, "none", [], "")
    return mapped


STOCK = Linear(functional.linear)
ONEDNN = Linear(_onednn, few_sizes=True)


def choose(device: str) -> Linear:
    """The better of the two on this device, with as many threads as torch is set to now."""
    if device != "cpu" or not torch.backends.mkldnn.is_available():
        return STOCK
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator) for shape in ((_ROWS, _IN), (_OUT, _IN), (_OUT,))
    )
    try:
        ours, theirs = ONEDNN.apply(x, weight, bias), STOCK.apply(x, weight, bias)
    except (AttributeError, RuntimeError, TypeError):
        return STOCK  # this build has no such operator, or with another signature
    if not torch.allclose(ours, theirs, atol=_TOLERANCE):
        return STOCK

    def best_s(linear: Linear) -> float:
        times_s = []
        for _ in range(_TRIALS):
            began_s = time.perf_counter()
            linear.apply(x, weight, bias)
            times_s.append(time.perf_counter() - began_s)
        return min(times_s)

    return ONEDNN if best_s(STOCK) > _GAIN * best_s(ONEDNN) else STOCK
