"""Models of files at their bounds: numbers that are none, slender pictures, pages without end."""

from __future__ import annotations

import tracemalloc

import cv2
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image

from shoal.errors import CapacityError, InvalidRequest, RunFailed
from shoal.ipc.messages import ModelSpec, RunItem
from shoal.runtimes.files import ocr
from shoal.runtimes.registry import create
from shoal.wire.media import MAX_SIDE_PX
from shoal.wire.records import unpack
from tests.support.files import encoded, lines_of_page, page, pdf, wav
from tests.support.runtime_models import array, package_path

BLACK, WHITE = (
    encoded(Image.new("RGB", (400, 400), colour), "PNG") for colour in ("black", "white")
)
SQUARE = ["n", 3, 64, 64]


@pytest.fixture(scope="module")
def files():
    runtime = create("files", "cpu", 1)
    runtime.load(ModelSpec("ocr", str(models()), "", ["extract"], family="ocr"))
    return runtime


def models():
    return package_path("rapidocr/models")


def loaded(runtime, path, family, task="extract", **fields):
    """Loads a model that was made for the test."""
    runtime.load(ModelSpec(family, str(path.parent), "", [task], family=family, **fields))
    return runtime


def save(path, nodes, inputs, outputs, constants=()):
    """A graph of float32 inputs and outputs; constants: names and their values."""
    graph = helper.make_graph(
        nodes,
        "made",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in outputs.items()],
        [onnx.numpy_helper.from_array(value, name) for name, value in dict(constants).items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(made, str(path))
    return path


def outcome(runtime, key, blob, task="extract"):
    (one,) = runtime.run(key, [RunItem("i", task, [1], blobs=[blob])]).outcomes
    return one


def test_ocr_computes_with_as_many_threads_as_it_is_given(files):
    """The library that prepares its pictures would take all cores of the machine."""
    cv2.setNumThreads(3)
    files.load(ModelSpec("ocr", str(models()), "", ["extract"], family="ocr"))
    assert cv2.getNumThreads() == 1


def test_ocr_whose_detector_gives_no_numbers_fails(files, tmp_path):
    """Roots of negative brightness are no page without text, but the model's fault."""
    for path in models().glob("*.onnx"):
        if "_det_" not in path.name:
            (tmp_path / path.name).symlink_to(path)
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[1]),
        helper.make_node("Sqrt", ["mean"], ["map"]),
    ]
    path = tmp_path / "made_det_graph.onnx"
    save(path, nodes, {"x": ["n", 3, "h", "w"]}, {"map": ["n", 1, "h", "w"]})
    runtime = create("files", "cpu", 1)
    error = outcome(loaded(runtime, path, "ocr"), "ocr", BLACK)
    assert isinstance(error, RunFailed)
    assert "not finite" in error.message


def test_layout_whose_graph_gives_no_numbers_fails(tmp_path):
    """Scores that are no numbers are an error; those of the next page are served."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[1, 2, 3]),
        helper.make_node("Sqrt", ["mean"], ["root"]),
        helper.make_node("Reshape", ["root", "shape"], ["one"]),
        helper.make_node("Add", ["one", "cells"], ["scores"]),
        helper.make_node("Identity", ["sides"], ["distances"]),
    ]
    constants = {
        "shape": np.array([1, 1, 1], np.int64),
        "cells": np.zeros((1, 64, 2), np.float32),
        "sides": np.zeros((1, 64, 32), np.float32),
    }
    outputs = {"scores": [1, 64, 2], "distances": [1, 64, 32]}
    path = save(tmp_path / "model.onnx", nodes, {"x": [1, *SQUARE[1:]]}, outputs, constants)
    runtime = loaded(create("files", "cpu", 1), path, "layout", labels=["text", "table"])
    assert isinstance(outcome(runtime, "layout", BLACK), RunFailed)
    (record,) = outcome(runtime, "layout", WHITE).records
    assert unpack(record).pages[0].regions


def test_voice_activity_whose_graph_gives_no_numbers_fails(tmp_path):
    """Chances that are no numbers are an error, and not silence."""
    nodes = [
        helper.make_node("ReduceMean", ["input"], ["mean"], axes=[1]),
        helper.make_node("Sqrt", ["mean"], ["chances"]),
        helper.make_node("Identity", ["h"], ["hn"]),
        helper.make_node("Identity", ["c"], ["cn"]),
    ]
    state = [1, 1, 128]
    inputs = {"input": ["n", 576], "h": state, "c": state}
    outputs = {"chances": ["n", 1], "hn": state, "cn": state}
    path = save(tmp_path / "model.onnx", nodes, inputs, outputs)
    runtime = loaded(create("files", "cpu", 1), path, "vad")
    high = np.full(16_000, 0.5, np.float32)
    assert isinstance(outcome(runtime, "vad", wav(-high)), RunFailed)
    (record,) = outcome(runtime, "vad", wav(high)).records
    assert unpack(record).segments


@pytest.mark.parametrize("ends_in_softmax", [True, False])
def test_image_classifier_gives_logits_where_its_graph_has_them(tmp_path, ends_in_softmax):
    """The graph's own, not the logarithms of probabilities, which never exceed 0."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[2, 3], keepdims=0),
        helper.make_node("Softmax" if ends_in_softmax else "Identity", ["mean"], ["y"]),
    ]
    path = save(tmp_path / "model.onnx", nodes, {"x": SQUARE}, {"y": ["n", 3]})
    runtime = loaded(
        create("files", "cpu", 1),
        path,
        "image_classifier",
        "classify",
        labels=["red", "green", "blue"],
    )
    result = outcome(runtime, "image_classifier", WHITE, "classify")
    assert array(result, "scores").sum() == pytest.approx(1)
    if ends_in_softmax:
        assert set(result.arrays) == {"scores"}
    else:
        assert array(result, "logits").min() > 2


def test_ocr_of_a_very_long_picture_takes_no_more_memory_than_of_a_page(files):
    """It is made smaller before it is padded to the shape that the library needs."""
    sliver = encoded(Image.new("1", (MAX_SIDE_PX, 100), 1), "PNG")
    tracemalloc.start()
    try:
        (record,) = outcome(files, "ocr", sliver).records
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    (found,) = unpack(record).pages
    assert (found.width, found.height, found.lines) == (MAX_SIDE_PX, 100, [])
    assert peak_bytes < 300_000_000


def test_ocr_of_a_large_picture_says_where_lines_are_in_that_picture(files):
    """Boxes are in pixels of the picture as it was sent, though a smaller one is read."""
    large = page().resize((6_000, 3_840))
    (record,) = outcome(files, "ocr", encoded(large, "PNG")).records
    (found,) = unpack(record).pages
    assert (found.width, found.height) == large.size
    assert [line.text for line in found.lines] == lines_of_page()
    left, top = found.lines[0].box[0]
    assert (left / 6, top / 6) == pytest.approx((60, 45), abs=12)


def test_ocr_ends_items_that_take_longer_than_a_batch_may(files, monkeypatch):
    """Alone it is the caller's fault; among others, another try may have the time for it."""
    document = pdf([page()] * 2)
    monkeypatch.setattr(ocr, "MAX_READING_S", 0.0)
    alone = outcome(files, "ocr", document)
    assert isinstance(alone, InvalidRequest)
    assert alone.input_index == 0
    assert "send" in alone.message
    items = [RunItem(name, "extract", [1], blobs=[document]) for name in "ab"]
    for error in files.run("ocr", items).outcomes:
        assert isinstance(error, CapacityError)
        assert error.retryable
