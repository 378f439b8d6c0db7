"""Reading torch checkpoints without torch: tensors come out, code never runs."""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict

import numpy as np
import pytest

from shoal.errors import ModelUnavailable
from shoal.runtimes import torch_zip
from tests.support.lazy import Lazy

torch = Lazy("torch")


def test_tensors_come_out_as_torch_wrote_them(tmp_path):
    """Types, shapes, views that share a storage, nesting; what is no tensor is left out."""
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    torch.save(
        {
            "a": OrderedDict({"net.0.weight": whole, "t": whole.T, "row": whole[1]}),
            "b": {
                "long": torch.tensor([1, -2]),
                "half": torch.tensor([1.5]).half(),
                "brain": torch.tensor([1.5, -3.0]).bfloat16(),
            },
            "flag": torch.tensor([True, False]),
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(7.0),
            "dim": 4,
            "names": ["x"],
        },
        tmp_path / "c.pt",
    )
    read = torch_zip.read(tmp_path / "c.pt")
    assert set(read) == {
        "a.net.0.weight",
        "a.t",
        "a.row",
        "b.long",
        "b.half",
        "b.brain",
        "flag",
        "empty",
        "scalar",
    }
    assert np.array_equal(read["a.t"], whole.numpy().T)
    assert read["a.row"].tolist() == [4, 5, 6, 7]
    assert read["b.long"].dtype == np.int64
    assert read["b.half"].tolist() == [1.5]
    assert read["b.brain"].dtype == np.float32
    assert read["b.brain"].tolist() == [1.5, -3.0]
    assert read["flag"].tolist() == [True, False]
    assert read["empty"].shape == (0, 3)
    assert read["scalar"].shape == ()


class Touch:
    """Unpickled by pickle itself, this would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def archive(path, pickled: bytes, **members: bytes):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("c/data.pkl", pickled)
        for name, data in members.items():
            file.writestr(f"c/data/{name.removeprefix('s')}", data)
    return path


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_would_run_code_is_refused_and_does_not(tmp_path, protocol):
    """A pickle that opens a file for writing: refused by name, and the file is not there."""
    path = archive(tmp_path / "evil.pt", pickle.dumps(Touch(tmp_path / "made"), protocol))
    with pytest.raises(ModelUnavailable, match=r"names .*open"):
        torch_zip.read(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "name",
    ["builtins.eval", "os.system", "numpy.load", "torch.load", "torch.FloatStorage.__class__"],
)
def test_every_other_name_is_refused(tmp_path, name):
    """Only the names that tensors need are known, nested attributes included."""
    module, _, attribute = name.partition(".")
    pickled = b"\x80\x04" + _text(module) + _text(attribute) + b"\x93."
    with pytest.raises(ModelUnavailable, match="which no tensor needs"):
        torch_zip.read(archive(tmp_path / "c.pt", pickled))


def _text(value: str) -> bytes:
    data = value.encode()
    return b"\x8c" + bytes([len(data)]) + data


class Crafted:
    """Pickles as a call of torch's tensor builder with chosen offset, shape and strides."""

    def __init__(self, *view):
        self.view = view

    def __reduce__(self):
        return (torch._utils._rebuild_tensor_v2, (Stored(), *self.view, False, OrderedDict()))


class Stored:
    """Stands for the storage `0` of four floats."""


class CraftedPickler(pickle.Pickler):
    def persistent_id(self, value):
        return ("storage", torch.FloatStorage, "0", "cpu", 4) if isinstance(value, Stored) else None


@pytest.mark.parametrize(
    "view",
    [
        (0, (5,), (1,)),
        (1, (4,), (1,)),
        (-1, (2,), (1,)),
        (3, (2,), (-1,)),
        (0, (2, 2), (1,)),
        (0, (2**40,), (0,)),
        (0, (-2, -2), (1, 1)),
    ],
)
def test_a_tensor_outside_its_storage_is_refused(tmp_path, view):
    """Offsets, shapes and strides that point beyond the bytes read nothing of the process."""
    target = tmp_path / "pickled"
    with target.open("wb") as file:
        CraftedPickler(file).dump({"x": Crafted(*view)})
    path = archive(tmp_path / "c.pt", target.read_bytes(), s0=np.zeros(4, np.float32).tobytes())
    with pytest.raises(ModelUnavailable, match="tensor"):
        torch_zip.read(path)


def test_a_crafted_tensor_within_its_storage_is_read(tmp_path):
    """The same builder with a view that fits gives the tensor: the test above can fail."""
    target = tmp_path / "pickled"
    with target.open("wb") as file:
        CraftedPickler(file).dump({"x": Crafted(1, (3,), (1,))})
    stored = np.arange(4, dtype=np.float32).tobytes()
    path = archive(tmp_path / "c.pt", target.read_bytes(), s0=stored)
    assert torch_zip.read(path)["x"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("data", [b"", b"not a zip", b"PK\x03\x04 cut"])
def test_a_file_of_another_kind_is_refused(tmp_path, data):
    """What is no zip at all ends in the same error."""
    (tmp_path / "c.pt").write_bytes(data)
    with pytest.raises(ModelUnavailable, match="no torch checkpoint"):
        torch_zip.read(tmp_path / "c.pt")
