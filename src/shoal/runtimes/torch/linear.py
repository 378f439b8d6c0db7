"""The linear map x @ W.T (+ b) on this machine: torch's own, or oneDNN's where that is faster.

On some CPUs torch's default library does not use the widest instructions and oneDNN is twice as
fast; on others they are alike. The operator that reaches oneDNN directly is private to torch, so it
is used only where a short trial finds it there, equal in its numbers, and faster. Owns that trial.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_ROWS, _IN, _OUT = 256, 384, 1536
_TRIALS = 5
_GAIN = 1.05
_TOLERANCE = 1e-4


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    operator = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 # nothing public reaches it
    mapped: Tensor = operator(x, weight, bias, "none", [], "")
    return mapped


def choose(device: str) -> Linear:
    """The faster of the two on this device, with as many threads as torch is set to now."""
    stock: Linear = functional.linear
    if device != "cpu" or not torch.backends.mkldnn.is_available():
        return stock
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator) for shape in ((_ROWS, _IN), (_OUT, _IN), (_OUT,))
    )
    try:
        same = torch.allclose(_onednn(x, weight, bias), stock(x, weight, bias), atol=_TOLERANCE)
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return stock  # this build has no such operator, or with another signature
    if not same:
        return stock

    def best_s(linear: Linear) -> float:
        times_s = []
        for _ in range(_TRIALS):
            began_s = time.perf_counter()
            linear(x, weight, bias)
            times_s.append(time.perf_counter() - began_s)
        return min(times_s)

    return _onednn if best_s(stock) > _GAIN * best_s(_onednn) else stock
