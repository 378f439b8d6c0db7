"""What is particular to the torch runtime: its linear maps, its options, and its memory."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from shoal.errors import ModelUnavailable
from shoal.runtimes.encoder import LoadedModel
from shoal.runtimes.registry import create
from tests.support.lazy import Lazy
from tests.support.runtime_models import (
    MINILM,
    dense_rows,
    item,
    package_path,
    reference,
    reference_hidden,
    run_one,
    save_tiny,
    sparse_rows,
    spec,
    tiny_ids,
)

torch = Lazy("torch")
maps = Lazy("shoal.runtimes.torch.linear")
networks = Lazy("shoal.runtimes.torch.network")
transformers = Lazy("transformers")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(transformers.BertForMaskedLM, tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("packs", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", ["STOCK", "ONEDNN"])
def test_both_linear_maps_give_the_reference(tiny, tmp_path, name, packs):
    """Whichever map the trial picks, dense and sparse vectors are those of transformers."""
    linear = getattr(maps, name)
    if linear is maps.ONEDNN:
        try:
            linear.apply(torch.zeros(32, 8), torch.zeros(8, 8), None)
        except (AttributeError, RuntimeError) as error:
            pytest.skip(f"this torch reaches no oneDNN: {error}")
    wanted = spec(tiny, tmp_path, outputs=["dense", "sparse"], normalize=False)
    network = networks.TorchTransformer(
        tiny / "model.safetensors", wanted, device="cpu", linear=linear, packs=packs
    )
    model = LoadedModel(wanted, network)
    sequences = tiny_ids(1, 2, 31, 32, 33, 48)
    (result,) = model.run([item("i", sequences, params={"outputs": ["dense", "sparse"]})]).outcomes
    dense = np.frombuffer(result.arrays["dense"].data, np.float32).reshape(len(sequences), -1)
    for n, ids in enumerate(sequences):
        expected = reference_hidden(tiny, ids).mean(axis=0)
        assert dense[n] == pytest.approx(expected, abs=2e-5)
        with torch.inference_mode():
            logits = reference(tiny)(torch.tensor([ids])).logits[0]
        weights = torch.log1p(torch.relu(logits)).amax(dim=0).numpy()
        assert sparse_rows(result, 120)[n] == pytest.approx(weights, abs=1e-4)


def test_the_trial_picks_one_of_the_two():
    """On the CPU either map, on any other device torch's own without a trial."""
    assert maps.choose("cpu") in (maps.STOCK, maps.ONEDNN)
    assert maps.choose("cuda:0") is maps.STOCK


def test_rows_are_rounded_to_few_sizes():
    """4,096 row counts become 44, as oneDNN keeps code for each; stock takes them as they are."""
    sizes = {maps.ONEDNN.rows(n) for n in range(1, 4097)}
    assert len(sizes) == 44
    assert all(0 <= maps.ONEDNN.rows(n) - n < 256 for n in range(1, 4097))
    assert maps.STOCK.rows(7) == 7


def test_packing_is_chosen_by_the_option(tiny, tmp_path):
    """Packed, ragged lengths cost their sum; padded, near lengths share a block."""
    runtime = create("torch", "cpu", 1)
    assert runtime.traits.packing
    sent = item("i", tiny_ids(4, 5))
    for chosen, tokens in ((True, {9}), (False, {10}), ("auto", {9, 10})):
        runtime.load(spec(tiny, tmp_path, options={"packing": chosen}))
        assert runtime.run("m@1", [sent]).padded_tokens in tokens
    with pytest.raises(ModelUnavailable, match="true, false or auto"):
        runtime.load(spec(tiny, tmp_path, key="n@1", options={"packing": "maybe"}))


def test_packed_groups_keep_to_the_budget(tiny, tmp_path):
    """More tokens than the budget run in several passes and give what they give alone."""
    runtime = create("torch", "cpu", 1)
    runtime.load(spec(tiny, tmp_path, batch_tokens=20))
    sequences = tiny_ids(12, 9, 7, 48, 3, 3)
    ours = dense_rows(runtime.run("m@1", [item("i", sequences)]))
    for ids, vector in zip(sequences, ours, strict=True):
        alone = dense_rows_of_one(runtime, ids)
        assert vector == pytest.approx(alone, abs=1e-5)


def dense_rows_of_one(runtime, ids):
    result = run_one(runtime, item("i", [ids]))
    return np.frombuffer(result.arrays["dense"].data, np.float32)


@pytest.mark.parametrize("name", ["onnx", "torch"])
def test_memory_returns_after_each_unload(tmp_path, name):
    """Eight loads and unloads of MiniLM leave what the second left, to within 12 MB."""
    program = f"""
import psutil
import numpy as np
from shoal.ipc.messages import ModelSpec, RunItem
from shoal.runtimes.registry import create

runtime = create({name!r}, "cpu", 1)
spec = ModelSpec("m", {str(package_path(MINILM))!r}, {str(tmp_path)!r}, ["encode"])
rng = np.random.default_rng(0)
for cycle in range(8):
    runtime.load(spec)
    lengths = rng.integers(3, 50, 6).tolist()
    ids = rng.integers(1000, 29000, sum(lengths)).astype("<u2").tobytes()
    runtime.run("m", [RunItem("i", "encode", lengths, ids=ids)])
    loaded = psutil.Process().memory_info().rss
    runtime.unload("m")
    print(loaded, psutil.Process().memory_info().rss)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    rows = [[int(part) for part in line.split()] for line in done.stdout.splitlines()]
    left = [after for _, after in rows]
    assert left[-1] - left[1] < 12e6
    assert rows[-1][0] - left[-1] > 40e6  # a loaded model can be told from none
