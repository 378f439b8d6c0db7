"""Whether an adapter fits a model, before the server sees it.

A server finds out in the middle of its work that an adapter has other shapes than its model, and
dies of it; of the config it reads rank and alpha, and passes over what else there is. So both are
checked here. It also reads whatever else lies beside an adapter's two files, so it is shown a
folder of links to these two. Owns both. Does not own reading the folder (`shoal.runtimes.adapters`)
or loading (`contract`).
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from shoal.errors import ModelUnavailable
from shoal.ipc.messages import AdapterSpec
from shoal.runtimes.adapters import CONFIG, WEIGHTS, read_adapter
from shoal.runtimes.checkpoint import read_header

Shapes = Mapping[str, tuple[int, ...]]

_IGNORED = ("use_rslora", "rank_pattern", "alpha_pattern")


def shapes_of(folder: Path) -> Shapes:
    """Name -> shape of every weight in the safetensors files of a model's folder."""
    return {
        name: tuple(shape)
        for file in sorted(folder.glob("*.safetensors"))
        for name, (_, shape, _, _) in read_header(file).items()
    }


def check(adapter: AdapterSpec, base: Shapes, max_rank: int) -> int:
    """Bytes of an adapter that fits. Raises `ModelUnavailable` for one that does not."""
    read = read_adapter(adapter)
    for field in _IGNORED:
        if read.config.values.get(field):
            raise read.config.refused(f"{field} is not supported by SGLang")
    for module, pair in read.pairs.items():
        shape = base.get(f"{module}.weight")
        rank = len(pair.a)
        if shape is None:
            raise ModelUnavailable(f"{adapter.key}: the model has no {module}: it is another's")
        if shape != (pair.b.shape[0], pair.a.shape[1]):
            raise ModelUnavailable(
                f"{adapter.key}: its pair for {module} makes "
                f"{(pair.b.shape[0], pair.a.shape[1])}, and the model has {shape}: it is another's"
            )
        if rank > max_rank:
            raise ModelUnavailable(
                f"{adapter.key} has rank {rank}, and the model was loaded with room for "
                f"{max_rank}: set its option `adapter_rank`"
            )
    return (Path(adapter.path) / WEIGHTS).stat().st_size


def view(adapter: AdapterSpec, within: Path) -> Path:
    """A new folder that has what was checked of an adapter, and nothing else."""
    folder = _place(adapter.key, within)
    folder.mkdir()
    for name in (CONFIG, WEIGHTS):
        (folder / name).symlink_to((Path(adapter.path) / name).resolve())
    return folder


def remove_view(key: str, within: Path) -> None:
    """Takes it away."""
    shutil.rmtree(_place(key, within), ignore_errors=True)


def _place(key: str, within: Path) -> Path:
    return within / hashlib.sha256(key.encode()).hexdigest()[:24]
