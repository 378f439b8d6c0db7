"""Files compared with their digests: once, and again when they have changed."""

from __future__ import annotations

import hashlib

import pytest

from shoal.catalog import digests
from shoal.catalog.digests import DigestMismatch, verify
from shoal.errors import ModelUnavailable, WeightsMissing


class Ended(Exception):
    """What a listener raises to end the work."""


@pytest.fixture
def model(tmp_path):
    """A folder with one file, and its digests."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "w.onnx").write_bytes(b"weights" * 1000)
    return folder, {"w.onnx": hashlib.sha256(b"weights" * 1000).hexdigest()}


def reads(folder, wanted, marks):
    """How often a comparison read a piece of a file."""
    read = []
    verify(folder, wanted, marks, lambda: read.append(1))
    return len(read)


def test_digests_are_compared_once_for_each_state_of_a_file(model, tmp_path):
    """A file is read at the first use, not at the next one, and again after a change."""
    folder, wanted = model
    assert reads(folder, wanted, tmp_path / "marks") > 0
    assert reads(folder, wanted, tmp_path / "marks") == 0
    (folder / "w.onnx").write_bytes(b"WEIGHTS" * 1000)
    with pytest.raises(DigestMismatch):
        verify(folder, wanted, tmp_path / "marks")


def test_digest_that_differs_names_file_expected_and_found(model, tmp_path):
    """The error says all that somebody needs to see which of the two is wrong."""
    folder, wanted = model
    expected, found = "0" * 64, wanted["w.onnx"]
    with pytest.raises(ModelUnavailable, match=rf"w\.onnx .*{found}, not {expected}"):
        verify(folder, {"w.onnx": expected}, tmp_path / "marks")
    with pytest.raises(WeightsMissing, match=r"none\.onnx"):
        verify(folder, {"none.onnx": expected}, tmp_path / "marks")


def test_digest_marks_are_bounded(model, tmp_path, monkeypatch):
    """Beyond the bound the oldest mark goes, and its file is read once more."""
    monkeypatch.setattr(digests, "MAX_MARKS", 2)
    folder, _ = model
    wanted = {}
    for n in range(digests.MAX_MARKS + 1):
        (folder / f"{n}.onnx").write_bytes(b"%d" % n)
        wanted[f"{n}.onnx"] = hashlib.sha256(b"%d" % n).hexdigest()
    verify(folder, wanted, tmp_path / "marks")
    assert len(list((tmp_path / "marks").iterdir())) == digests.MAX_MARKS


def test_digest_comparison_can_be_ended(model, tmp_path):
    """What `on_read` raises ends it, and nothing is believed of the file."""

    def leave():
        raise Ended

    folder, wanted = model
    with pytest.raises(Ended):
        verify(folder, wanted, tmp_path / "marks", leave)
    assert reads(folder, wanted, tmp_path / "marks") > 0
