"""Heads over pooled vectors: their arithmetic and what they refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from shoal.errors import ModelUnavailable
from shoal.ipc.messages import HeadSpec
from shoal.runtimes.heads import Head, load_head, margin, sigmoid, softmax

logit_rows = st.lists(
    st.lists(st.floats(-60, 60, width=32), min_size=3, max_size=3), min_size=1, max_size=5
)


def floats(*rows):
    return np.array(rows, np.float32)


@settings(max_examples=40)
@given(logit_rows)
def test_margin_and_probability_are_one_number_in_two_forms(rows):
    """The sigmoid of the margin is the softmax probability of the class."""
    logits = floats(*rows)
    for place in range(3):
        assert sigmoid(margin(logits, place)) == pytest.approx(
            softmax(logits)[:, place], rel=1e-4, abs=1e-7
        )


def test_margin_orders_where_the_probability_is_full():
    """Logits so large that both probabilities round to 1 still have different margins."""
    logits = floats([90, 0], [95, 0])
    assert sigmoid(margin(logits, 0)).tolist() == [1.0, 1.0]
    assert margin(logits, 0).tolist() == [90.0, 95.0]


def test_sigmoid_and_softmax_stay_finite_far_out():
    """No overflow (a warning would fail this test) for the largest logits of either sign."""
    far = floats([3e38, -3e38])
    assert sigmoid(far).tolist() == [[1.0, 0.0]]
    assert softmax(floats([1e38, -1e38])).tolist() == [[1.0, 0.0]]


def test_a_head_without_layers_passes_logits_on():
    """Where the network ends in logits, the head adds only their meaning."""
    logits = floats([1, 2], [3, 4])
    assert Head((), ("a", "b")).logits(logits) is logits


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("relu", lambda x: max(x, 0.0)),
        ("tanh", math.tanh),
        ("gelu", lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2)))),
    ],
)
def test_activations_stand_between_layers_only(activation, function):
    """Two identity layers: the activation is applied once, not after the last layer."""
    layer = (floats([1, 0], [0, 1]), np.zeros(2, np.float32))
    head = Head((layer, layer), ("a", "b"), activation)
    x = floats([-1.5, 2.0])
    assert head.logits(x)[0] == pytest.approx([function(-1.5), function(2.0)], abs=1e-6)


def test_a_pair_head_reads_both_vectors_their_distance_and_product():
    """Features in the order a, b, |a-b|, a*b."""
    head = Head(((np.eye(4, dtype=np.float32), np.zeros(4, np.float32)),), ("a",) * 4, pair=True)
    assert head.logits(floats([2]), floats([5]))[0].tolist() == [2, 5, 3, 10]


def write(path, **layers):
    save_file({name: np.array(value, np.float32) for name, value in layers.items()}, path)


def test_layers_are_taken_in_the_order_of_their_numbers(tmp_path):
    """net.10 comes after net.2, and what has another prefix is left alone."""
    write(
        tmp_path / "h.safetensors",
        **{
            "h.net.10.weight": [[1, 1]],
            "h.net.10.bias": [0.5],
            "h.net.2.weight": [[2], [3]],
            "h.net.2.bias": [0, 0],
            "other.net.0.weight": [[9]],
            "other.net.0.bias": [9],
        },
    )
    head = load_head(HeadSpec("linear", "h.safetensors", "h.", ["x"]), tmp_path, "m")
    assert head.logits(floats([1])).tolist() == [[5.5]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prefix": "none."}, r"holds no none\.net"),
        ({"labels": ["a"]}, "2 classes, 1 are named"),
        ({"positive": "c"}, "'c' is not one of"),
        ({"file": "absent.safetensors"}, "cannot be read"),
        ({"file": "h.pt"}, "allow_pickle"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(tmp_path, change, says):
    """Wrong prefix, labels, positive class or file: the message says which."""
    write(tmp_path / "h.safetensors", **{"net.0.weight": [[1], [2]], "net.0.bias": [0, 0]})
    fields = {"kind": "linear", "file": "h.safetensors", "prefix": "", "labels": ["a", "b"]}
    with pytest.raises(ModelUnavailable, match=says):
        load_head(HeadSpec(**{**fields, **change}), tmp_path, "m")


def test_layers_that_do_not_fit_each_other_are_refused(tmp_path):
    """A layer that reads another width than the one before gives, or lacks its bias."""
    spec = HeadSpec("linear", "h.safetensors", "", ["a"])
    layers = {"net.0.weight": [[1], [2]], "net.0.bias": [0, 0], "net.3.weight": [[1, 1, 1]]}
    write(tmp_path / "h.safetensors", **layers)
    with pytest.raises(ModelUnavailable, match=r"lacks net\.3\.bias"):
        load_head(spec, tmp_path, "m")
    write(tmp_path / "h.safetensors", **layers, **{"net.3.bias": [0]})
    with pytest.raises(ModelUnavailable, match="neighbours"):
        load_head(spec, tmp_path, "m")
