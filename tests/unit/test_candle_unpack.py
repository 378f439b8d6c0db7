"""A GGUF file of packed weights as one of plain weights."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest

from shoal.errors import ModelUnavailable
from shoal.runtimes.candle.gguf import read_head
from shoal.runtimes.candle.unpack import WEIGHTS, main

RNG = np.random.default_rng(0)
MATRIX = RNG.standard_normal((4, 64)).astype(np.float32)
NORM = RNG.standard_normal(64).astype(np.float32)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A file with a matrix of four bits and a norm, as the library writes it."""
    path = tmp_path_factory.mktemp("packed") / "m.gguf"
    kind = gguf.GGMLQuantizationType.Q4_1
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["<s>", "a"])
    writer.add_tensor("a.weight", gguf.quants.quantize(MATRIX, kind), raw_dtype=kind)
    writer.add_tensor("a_norm.weight", NORM)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("form", ["float16", "float32"])
def test_unpacked_file_has_the_same_head_and_numbers(packed, tmp_path, form):
    """The library reads what it reads of the packed file; norms stay in float32."""
    main(packed, tmp_path, form)
    old, new = gguf.GGUFReader(packed), gguf.GGUFReader(tmp_path / WEIGHTS)
    assert read_head(tmp_path / WEIGHTS).fields == read_head(packed).fields
    assert [one.name for one in new.tensors] == [one.name for one in old.tensors]
    for before, after in zip(old.tensors, new.tensors, strict=True):
        expected = gguf.quants.dequantize(before.data, before.tensor_type)
        is_half = (form, after.name) == ("float16", "a.weight")
        assert after.tensor_type.name == ("F16" if is_half else "F32")
        np.testing.assert_array_equal(after.data, expected.astype(after.data.dtype))
    assert np.abs(new.tensors[0].data - MATRIX).max() < 0.2


@pytest.mark.parametrize(
    ("at", "number", "what"),
    [
        (16, 99, "cannot be unpacked"),  # no such packing
        (16, 10, "cannot be unpacked"),  # a packing of 256 numbers, of which the rows have 64
        (0, 2**40, "cut short"),  # rows
        (20, 2**40, "cut short"),  # the place of the tensor
    ],
)
def test_unpacking_refuses_what_a_head_claims_wrongly(packed, tmp_path, at, number, what):
    """Nothing is made of a size or a place before the file was seen to have it."""
    data = bytearray(packed.read_bytes())
    info = data.index(b"a.weight") + len(b"a.weight") + 4  # behind the count of dimensions
    struct.pack_into("<I" if number < 2**32 else "<Q", data, info + at, number)
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelUnavailable, match=what):
        main(path, tmp_path, "float32")


def test_unpacking_refuses_a_file_that_ends_too_soon(packed, tmp_path):
    """The tensor that is not whole is named."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(packed.read_bytes()[:-64])
    with pytest.raises(ModelUnavailable, match=r"cut short: a_norm\.weight"):
        main(path, tmp_path, "float32")
