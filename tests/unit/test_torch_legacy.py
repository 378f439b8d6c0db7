"""Reading torch checkpoints of the older format: tensors come out, code never runs."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from shoal.errors import ModelUnavailable
from shoal.runtimes import torch_legacy
from shoal.runtimes.checkpoint import read_weights
from tests.support.lazy import Lazy

torch = Lazy("torch")


def save(value, path):
    torch.save(value, path, _use_new_zipfile_serialization=False)
    return path


def test_legacy_tensors_come_out_as_torch_wrote_them(tmp_path):
    """Types, shapes, views that share a storage, and nesting."""
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    state = {"a": {"w": whole, "t": whole.T}, "b": torch.tensor([1, -2])}
    state |= {"n": 3, "brain": torch.tensor([1.5, -3.0]).bfloat16()}
    read = read_weights(save(state, tmp_path / "c.pth"), allow_pickle=True)
    assert set(read) == {"a.w", "a.t", "b", "brain"}
    assert np.array_equal(read["a.t"], whole.numpy().T)
    assert read["b"].tolist() == [1, -2]
    assert read["brain"].tolist() == [1.5, -3.0]


class Touch:
    """Unpickled by pickle itself, this would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_legacy_checkpoint_cannot_run_code(tmp_path):
    """A pickle that names a function is refused, and the function is not called."""
    for value in ({"x": Touch(tmp_path / "made")}, {"x": torch.nn.Linear(1, 1)}):
        with pytest.raises(ModelUnavailable, match="names"):
            torch_legacy.read(save(value, tmp_path / "c.pth"))
    assert not (tmp_path / "made").exists()


def test_damaged_legacy_checkpoint_is_refused(tmp_path):
    """Cut anywhere, with another count before the bytes, or another file altogether."""
    path = save({"x": torch.arange(10)}, tmp_path / "c.pth")
    whole = path.read_bytes()
    wrong_count = whole[:-88] + (9).to_bytes(8, "little") + whole[-80:]
    cuts = [whole[:end] for end in range(0, len(whole) - 1, 7)]
    for data in (*cuts, wrong_count, pickle.dumps(7), b"\xff" * 99):
        path.write_bytes(data)
        with pytest.raises(ModelUnavailable, match="no torch checkpoint"):
            torch_legacy.read(path)
