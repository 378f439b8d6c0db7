"""The host-memory tier of the ONNX runtime: what an eviction keeps, and what a load makes of it."""

from __future__ import annotations

import shutil
from time import process_time

import numpy as np
import pytest

from shoal.runtimes.onnx import prepared
from shoal.runtimes.registry import create
from tests.support.lazy import Lazy
from tests.support.runtime_models import (
    INT8,
    SPLADE,
    array,
    item,
    package_path,
    random_ids,
    run_one,
    save_tiny,
    spec,
    tiny_ids,
)

transformers = Lazy("transformers")

pytestmark = pytest.mark.slow

BOTH = ["dense", "sparse"]


@pytest.fixture
def runtime():
    return create("onnx", "cpu", 1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(transformers.BertForMaskedLM, tmp_path_factory.mktemp("tiny"))


def numbers(runtime, ids, key="m@1"):
    """All arrays of one item's result, as bytes."""
    result = run_one(runtime, item("i", ids, params={"outputs": BOTH}), key)
    return {name: array(result, name).tobytes() for name in result.arrays}


def kept_in(cache_dir):
    return sorted(cache_dir.glob("prepared/*"))


def test_tier_numbers_are_the_same_to_the_bit(runtime, tmp_path):
    """A real model gives the same dense and sparse numbers before and after it was kept."""
    wanted = spec(package_path(SPLADE), tmp_path, outputs=BOTH)
    ids = [random_ids(length) for length in (3, 17, 60)]
    assert not runtime.load(wanted)
    before = numbers(runtime, ids)
    runtime.unload("m@1", keep=True)
    assert runtime.memory() == {}
    for _ in range(2):
        assert runtime.load(wanted)
        assert numbers(runtime, ids) == before
        runtime.unload("m@1", keep=True)


def test_tier_makes_a_reload_a_fraction(runtime, tmp_path):
    """Most of a load is not done again: at least half of the processor time is saved."""
    wanted = spec(package_path(INT8), tmp_path, weights="model.onnx")
    took_s = {False: [], True: []}
    for keep in (False, False, True, True, True):
        begun_s = process_time()
        warm = runtime.load(wanted)
        took_s[warm].append(process_time() - begun_s)
        runtime.unload("m@1", keep=keep)
    assert min(took_s[True]) < 0.5 * min(took_s[False]), took_s


def test_tier_keeps_nothing_of_a_model_that_is_removed(runtime, tiny, tmp_path):
    """Unloaded for good, a model's files go, and its next load starts from nothing."""
    wanted = spec(tiny, tmp_path, outputs=BOTH)
    runtime.load(wanted)
    runtime.unload("m@1", keep=True)
    assert len(kept_in(tmp_path)) == 2  # the encoder and the head that predicts words
    runtime.load(wanted)
    runtime.unload("m@1")
    assert kept_in(tmp_path) == []
    assert not runtime.load(wanted)


def test_tier_never_mistakes_one_model_for_another(runtime, tmp_path):
    """Weights that changed at the same place are not served from what was kept of the old ones."""
    folder, ids = tmp_path / "model", tiny_ids(6)
    save_tiny(transformers.BertModel, folder)
    wanted = spec(folder, tmp_path)
    runtime.load(wanted)
    old = array(run_one(runtime, item("i", ids)), "dense")
    runtime.unload("m@1", keep=True)
    shutil.rmtree(folder)
    save_tiny(transformers.BertModel, folder, initializer_range=0.1)
    assert not runtime.load(wanted)
    assert not np.array_equal(old, array(run_one(runtime, item("i", ids)), "dense"))


def test_tier_survives_damage_and_a_folder_that_cannot_be_written(runtime, tiny, tmp_path):
    """A damaged file is a cold load with right numbers; no folder for it is no reason to fail."""
    wanted, ids = spec(tiny, tmp_path, outputs=BOTH), tiny_ids(4, 9)
    runtime.load(wanted)
    before = numbers(runtime, ids)
    runtime.unload("m@1", keep=True)
    for folder in kept_in(tmp_path):
        (folder / prepared.GRAPH).write_bytes(b"no graph")
    assert not runtime.load(wanted)
    assert numbers(runtime, ids) == before
    shutil.rmtree(tmp_path / "prepared", ignore_errors=True)
    (tmp_path / "prepared").write_text("no folder")
    runtime.unload("m@1", keep=True)
    assert not runtime.load(wanted)
    assert numbers(runtime, ids) == before


def test_tier_is_bounded_and_forgets_what_was_used_longest_ago(tmp_path, monkeypatch):
    """Over the bound in bytes, the oldest goes; what was found again counts as new."""
    monkeypatch.setattr(prepared, "MAX_PREPARED_BYTES", 250)
    folders = [tmp_path / "prepared" / name for name in "abc"]

    def write(folder):
        (folder / prepared.GRAPH).write_bytes(bytes(100))

    for folder in folders[:2]:
        prepared.make(folder, write)
    assert kept_in(tmp_path) == folders[:2]
    assert prepared.find(folders[0]) is not None
    prepared.make(folders[2], write)
    assert kept_in(tmp_path) == [folders[0], folders[2]]
