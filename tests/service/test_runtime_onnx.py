"""What is particular to the ONNX runtime: its cache, exported graphs, and what it imports."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from shoal.errors import ModelUnavailable, RuntimeUnavailable
from shoal.runtimes.registry import create
from tests.support.lazy import Lazy
from tests.support.runtime_models import (
    array,
    dense_rows,
    item,
    run_one,
    save_tiny,
    spec,
    tiny_ids,
)

transformers = Lazy("transformers")


@pytest.fixture
def runtime():
    return create("onnx", "cpu", 1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(transformers.BertModel, tmp_path_factory.mktemp("tiny"))


def test_derived_graphs_are_kept_and_mended(runtime, tiny, tmp_path):
    """The second load reads the file; a damaged one is built again; other shapes get their own."""
    sent = item("i", tiny_ids(5, 8))
    runtime.load(spec(tiny, tmp_path))
    vectors = dense_rows(runtime.run("m@1", [sent]))
    (path,) = tmp_path.iterdir()
    whole, written = path.read_bytes(), path.stat().st_ino
    runtime.load(spec(tiny, tmp_path))
    assert path.stat().st_ino == written
    for damage in (whole[:-7], b"", whole[:50] + b"\0" + whole[51:]):
        path.write_bytes(damage)
        runtime.load(spec(tiny, tmp_path))
        assert path.read_bytes() == whole
        assert np.array_equal(vectors, dense_rows(runtime.run("m@1", [sent])))
    other = save_tiny(transformers.BertModel, tmp_path / "other", num_hidden_layers=1)
    runtime.load(spec(other, tmp_path))
    assert len(list(tmp_path.glob("*.graph"))) == 2


def test_a_cache_that_cannot_be_written_does_not_matter(runtime, tiny, tmp_path):
    """A file where the folder should be: the graph is built for this load alone."""
    (tmp_path / "taken").write_text("no folder")
    runtime.load(spec(tiny, tmp_path / "taken"))
    assert len(dense_rows(runtime.run("m@1", [item("i", tiny_ids(5))]))) == 1


def test_a_warm_cache_needs_neither_torch_nor_the_graph_library(tiny, tmp_path):
    """A process that finds its graph imports neither; one that builds it imports no torch."""
    program = (
        "import sys\n"
        "from shoal.runtimes.registry import available, create\n"
        "from shoal.ipc.messages import ModelSpec\n"
        "assert available('torch') is None and available('onnx') is None\n"
        "heavy = {'torch', 'onnxruntime', 'onnx', 'transformers'}\n"
        "assert not heavy & set(sys.modules)\n"
        "runtime = create('onnx', 'cpu', 1)\n"
        f"runtime.load(ModelSpec('m', {str(tiny)!r}, {str(tmp_path)!r}, ['encode']))\n"
        "print(*sorted(heavy & set(sys.modules)))\n"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert found == [["onnx", "onnxruntime"], ["onnxruntime"]]


def pooled_graph(path, *, extra_input: bool = False) -> None:
    """Saves a graph that pools: the mean of a table's rows over the mask, [batch, 4]."""
    table = np.arange(40, dtype=np.float32).reshape(10, 4)
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "two"], ["wide"]),
        helper.make_node("Mul", ["rows", "wide"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "one"], ["sums"], keepdims=0),
        helper.make_node("ReduceSum", ["mask", "one"], ["counts"], keepdims=1),
        helper.make_node("Div", ["sums", "counts"], ["vectors"]),
    ]
    names = ["input_ids", "attention_mask", *(["pixel_values"] if extra_input else [])]
    dims = ["batch", "tokens"]
    graph = helper.make_graph(
        nodes,
        "pooled",
        [helper.make_tensor_value_info(name, TensorProto.INT32, dims) for name in names],
        [helper.make_tensor_value_info("vectors", TensorProto.FLOAT, ["batch", 4])],
        [
            onnx.numpy_helper.from_array(table, "table"),
            onnx.numpy_helper.from_array(np.array([1], np.int64), "one"),
            onnx.numpy_helper.from_array(np.array([2], np.int64), "two"),
        ],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), str(path))


def test_a_graph_that_pools_is_taken_as_it_is(runtime, tmp_path):
    """Pooling `none`: the graph's own vectors, padding or not, with ids of the type it wants."""
    pooled_graph(tmp_path / "model.onnx")
    runtime.load(spec(tmp_path, tmp_path, pooling="none", normalize=False))
    (row, wide) = dense_rows(runtime.run("m@1", [item("i", [[1], [2, 4, 9]])]))
    assert row.tolist() == [4, 5, 6, 7]
    assert wide.tolist() == [20, 21, 22, 23]
    with pytest.raises(ModelUnavailable, match="no output of floats with 3 axes"):
        runtime.load(spec(tmp_path, tmp_path, key="n@1", pooling="mean"))


def test_a_graph_with_two_axes_can_be_a_classifier(runtime, tmp_path):
    """Pooling `none` and the task classify: the graph's output is taken as logits."""
    pooled_graph(tmp_path / "model.onnx")
    runtime.load(spec(tmp_path, tmp_path, pooling="none", tasks=["classify"]))
    result = run_one(runtime, item("i", [[1], [2, 4]], task="classify"))
    assert array(result, "logits").tolist() == [[4, 5, 6, 7], [12, 13, 14, 15]]
    assert array(result, "scores").sum(axis=1) == pytest.approx(1.0)
    assert result.labels == ["LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3"]


def test_a_graph_with_unknown_inputs_is_refused(runtime, tmp_path):
    """An input that is nothing made of tokens is named."""
    pooled_graph(tmp_path / "model.onnx", extra_input=True)
    with pytest.raises(ModelUnavailable, match="pixel_values"):
        runtime.load(spec(tmp_path, tmp_path, pooling="none"))


def test_a_damaged_graph_is_refused(runtime, tmp_path):
    """Bytes that are no graph end in ModelUnavailable that says which model."""
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07 this is no graph")
    with pytest.raises(ModelUnavailable, match="m@1: the graph does not load"):
        runtime.load(spec(tmp_path, tmp_path))


def test_a_device_that_is_not_there_is_refused():
    """CUDA without a CUDA build is RuntimeUnavailable when the runtime is made."""
    for name in ("onnx", "torch"):
        with pytest.raises(RuntimeUnavailable, match="cuda:0"):
            create(name, "cuda:0", 1)
