"""Which linear maps of a generator an adapter has to change, and whether it does.

The engine refuses what does not fit the base, and takes an adapter that lacks layers. Owns finding
that. Does not own what an adapter's folder says (`runtimes.adapters`), or loading it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.errors import ModelUnavailable
from shoal.ipc.messages import AdapterSpec
from shoal.runtimes.adapters import read_adapter
from shoal.runtimes.checkpoint import read_header

_LAYERS = ".layers."
_WEIGHT = ".weight"


def linear_maps(parts: Sequence[Path]) -> frozenset[str]:
    """The linear maps in the layers of a checkpoint, as it names them."""
    return frozenset(
        name.removesuffix(_WEIGHT)
        for part in parts
        for name, (_, shape, _, _) in read_header(part).items()
        if _LAYERS in name and name.endswith(_WEIGHT) and len(shape) == 2
    )


def check(adapter: AdapterSpec, maps: frozenset[str]) -> None:
    """Raises `ModelUnavailable` for an adapter that is not whole."""
    found = read_adapter(adapter)
    wanted = {name for name in maps if found.config.targets(name)}
    missing = sorted(wanted - set(found.pairs))
    if missing:
        raise ModelUnavailable(
            f"{adapter.key} is not whole: {missing[0]} and {len(missing) - 1} more of the linear "
            "maps that its config names are not in it"
        )
