"""A BERT checkpoint as an ONNX file that stands alone, with 8-bit weights if wanted.

Owns making the file from the runtime's own graph (`graph`), quantising it, and comparing what it
computes with its source. Does not own catalog entries or what is printed (the command). Dynamic
quantisation as ONNX Runtime has it: weights become 8-bit integers with a scale for each channel,
activations are scaled as they come. On CPUs without VNNI instructions its sums may saturate, and
quality is worse there: `compare` on the machine that will serve.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from shoal.errors import ModelUnavailable, ShoalError
from shoal.ipc.messages import ModelSpec, RunItem
from shoal.runtimes.bert import (
    WORDS,
    BertShape,
    BertWeights,
    classifier_of,
    expected,
    read_config,
    token_classifier_of,
)
from shoal.runtimes.checkpoint import SafetensorsFile
from shoal.runtimes.interface import Runtime
from shoal.runtimes.onnx import graph

# Protocol buffers end there, and with them a file that stands alone.
_FILE_BYTES = 2**31 - 1
_NAMES = {"mask": "attention_mask", "types": "token_type_ids", "hidden": "last_hidden_state"}
_DIMS = ["batch", "tokens"]


def export(weights_file: Path, spec: ModelSpec, path: Path, *, int8: bool) -> None:
    """Writes a checkpoint's network as an ONNX file.

    Inputs input_ids, attention_mask and token_type_ids, int64 [batch, tokens]. Outputs
    last_hidden_state, float32 [batch, tokens, d], and where the checkpoint has a classifier logits:
    [batch, k] of texts or [batch, tokens, k] of tokens. int8: quantise it; the second map of each
    layer's feed-forward block stays float32, which costs little and keeps most of what is lost.
    Raises `ModelUnavailable` for a checkpoint of another family, and one that is too large.
    """
    if weights_file.suffix != ".safetensors":
        raise ModelUnavailable(f"{spec.key}: only safetensors checkpoints are exported")
    model = _whole(weights_file, spec)
    if model.ByteSize() > _FILE_BYTES:
        raise ModelUnavailable(f"{spec.key} is over 2 GiB, more than one ONNX file holds")
    if not int8:
        path.write_bytes(model.SerializeToString())
        return
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # The quantiser turns a Gemm into a MatMul of this name, and only then looks who is exempt.
    kept = [f"{node.name}_MatMul" for node in model.graph.node if _is_second_map(node)]
    # Pre-processing would infer shapes and fuse operators that this graph does not have.
    helper.set_model_props(model, {"onnx.quant.pre_process": "onnxruntime.quant"})
    quantize_dynamic(
        model, path, per_channel=True, weight_type=QuantType.QInt8, nodes_to_exclude=kept
    )


def _is_second_map(node: onnx.NodeProto) -> bool:
    return node.op_type == "Gemm" and any(
        name.endswith(".output.dense.weight") and ".attention." not in name for name in node.input
    )


def _whole(weights_file: Path, spec: ModelSpec) -> onnx.ModelProto:
    """The encoder's graph with its weights inside, from token ids on."""
    config = read_config(weights_file.parent)
    shape = BertShape.read(config, spec.key)
    weights = BertWeights(SafetensorsFile(weights_file), shape)
    model = onnx.load_from_string(graph.encoder(shape))
    inside = model.graph
    stored = [one for one in inside.initializer if one.data_location != TensorProto.EXTERNAL]
    del inside.initializer[:]
    named = [numpy_helper.from_array(weights[name], name) for name in expected(shape)]
    inside.initializer.extend([*stored, *named])
    for node in inside.node:
        node.input[:] = [_NAMES.get(name, name) for name in node.input]
        node.output[:] = [_NAMES.get(name, name) for name in node.output]
    inside.node.insert(0, helper.make_node("Gather", [WORDS, "input_ids"], ["words"], "words"))
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    del inside.input[:]
    inside.input.extend(
        helper.make_tensor_value_info(name, TensorProto.INT64, _DIMS) for name in inputs
    )
    del inside.output[:]
    inside.output.append(_floats("last_hidden_state", [*_DIMS, shape.hidden]))
    _add_logits(inside, weights, shape, config, spec)
    onnx.checker.check_model(model)
    return model


def _floats(name: str, dims: Sequence[str | int]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)


def _add_logits(
    inside: onnx.GraphProto,
    weights: BertWeights,
    shape: BertShape,
    config: dict[str, Any],
    spec: ModelSpec,
) -> None:
    """Adds the checkpoint's own classifier, of texts or of tokens, if it has one."""

    def store(value: Any, name: str) -> str:
        inside.initializer.append(numpy_helper.from_array(value, name))
        return name

    def op(kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        inside.node.append(helper.make_node(kind, inputs, [output], output, **attributes))
        return output

    head = classifier_of(weights, shape, config, spec)
    by_token = token_classifier_of(weights, shape)
    if head is not None:
        first = store(np.array(0, np.int64), "first_token")
        x = op("Gather", ["last_hidden_state", first], "first_states", axis=1)
        for at, (weight, bias) in enumerate(head.layers):
            if at:
                x = op("Tanh", [x], f"head_{at}_input")
            names = [store(weight, f"head_{at}.weight"), store(bias, f"head_{at}.bias")]
            last = at + 1 == len(head.layers)
            x = op("Gemm", [x, *names], "logits" if last else f"head_{at}", transB=1)
        inside.output.append(_floats("logits", ["batch", len(head.layers[-1][1])]))
    elif by_token is not None:
        weight, bias = by_token
        x = op("MatMul", ["last_hidden_state", store(weight.T, "tags.weight")], "tags")
        op("Add", [x, store(bias, "tags.bias")], "logits")
        inside.output.append(_floats("logits", [*_DIMS, len(bias)]))


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a model's vectors relate to its source's, and the speed of both in tokens a second.

    same_neighbour: share of texts whose nearest other text is the same.
    """

    texts: int
    mean_cosine: float
    worst_cosine: float
    same_neighbour: float
    source_tokens_per_s: float
    tokens_per_s: float


def compare(
    source: tuple[Runtime, str], other: tuple[Runtime, str], items: Sequence[RunItem]
) -> Comparison:
    """Runs the same encode items through two loaded models (a runtime and a model's key).

    The items give dense vectors of length 1, two at least. Raises what a run raises.
    """
    before, source_speed = _encode(*source, items)
    after, speed = _encode(*other, items)
    cosines = np.einsum("nd,nd->n", before, after)
    same = _neighbours(before) == _neighbours(after)
    return Comparison(
        len(cosines),
        float(cosines.mean()),
        float(cosines.min()),
        float(same.mean()),
        source_speed,
        speed,
    )


_PASSES = 2


def _encode(runtime: Runtime, key: str, items: Sequence[RunItem]) -> tuple[Any, float]:
    """Vectors float32 [n, d] of all items, and useful tokens a second in the better of passes."""
    best_s = float("inf")
    for _ in range(_PASSES):
        began_s = time.perf_counter()
        outcomes = runtime.run(key, items).outcomes
        best_s = min(best_s, time.perf_counter() - began_s)
    rows = []
    for outcome in outcomes:
        if isinstance(outcome, ShoalError):
            raise outcome
        dense = outcome.arrays["dense"]
        rows.append(np.frombuffer(dense.data, "<f4").reshape(dense.shape))
    return np.concatenate(rows), sum(sum(item.lengths) for item in items) / best_s


def _neighbours(vectors: Any) -> Any:
    """Index of the nearest other vector of each, int64 [n]."""
    likeness = vectors @ vectors.T
    np.fill_diagonal(likeness, -np.inf)
    return likeness.argmax(axis=1)
