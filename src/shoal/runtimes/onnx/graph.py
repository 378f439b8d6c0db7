"""The BERT family as ONNX graphs, made from its shape alone.

Two graphs: the encoder (token ids -> hidden states) and the masked-language head that turns
hidden states into SPLADE vectors. Their weights are named, not stored: the session takes them from
the mapped checkpoint, so that they exist once in memory and the graph is a few kilobytes.
Follows Devlin et al. 2018 (BERT) and Formal et al. 2021 (SPLADE). Owns the graphs. Does not own
sessions (`session`) or the checkpoint's names (`shoal.runtimes.bert`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from shoal.runtimes.bert import (
    MLM_DECODER,
    MLM_NORM,
    MLM_TRANSFORM,
    POSITIONS,
    TYPES,
    BertShape,
    layer_matrices,
)

# Graphs are cached: whatever changes them here must raise `networks.GRAPH_VERSION`.
OPSET = 20  # the first with Gelu as an operator
IR_VERSION = 9


class _Graph:
    """Nodes as they come, each with one output that carries the node's name."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}

    def op(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        name = f"n{len(self.nodes)}"
        node = helper.make_node(kind, list(inputs), [name], name, **attributes)
        self.nodes.append(node)
        return name

    def constant(self, value: Any, dtype: type = np.int64) -> str:
        name = f"c{len(self.initializers)}"
        self.initializers[name] = numpy_helper.from_array(np.array(value, dtype), name)
        return name

    def weight(self, name: str, shape: Sequence[int]) -> str:
        """A float32 tensor that the session will supply under this name."""
        tensor = TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT)
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="checkpoint")
        self.initializers[name] = tensor
        return name

    def linear(self, x: str, name: str, shape: tuple[int, int]) -> str:
        """[n, in] -> [n, out]; the matrix stays [out, in] as checkpoints have it."""
        weight = self.weight(f"{name}.weight", shape)
        return self.op("Gemm", [x, weight, self.weight(f"{name}.bias", shape[:1])], transB=1)

    def norm(self, x: str, name: str, width: int, eps: float) -> str:
        scale, shift = self.weight(f"{name}.weight", [width]), self.weight(f"{name}.bias", [width])
        return self.op("LayerNormalization", [x, scale, shift], axis=-1, epsilon=eps)

    def activation(self, x: str, kind: str) -> str:
        if kind == "gelu":
            return self.op("Gelu", [x])
        if kind in ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"):
            return self.op("Gelu", [x], approximate="tanh")
        if kind in ("silu", "swish"):
            return self.op("Mul", [x, self.op("Sigmoid", [x])])
        return self.op({"relu": "Relu", "tanh": "Tanh"}[kind], [x])

    def heads(self, x: str, split: str, order: list[int]) -> str:
        """[tokens of all rows, hidden] -> four axes, one of them the attention heads, in order."""
        return self.op("Transpose", [self.op("Reshape", [x, split])], perm=order)

    def model(
        self, inputs: Mapping[str, tuple[int, list[str | int]]], output: str, dims: list[str | int]
    ) -> bytes:
        """The graph, serialised; its one output is the last node's."""
        self.nodes[-1].output[0] = output
        graph = helper.make_graph(
            self.nodes,
            "shoal",
            [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, dims)],
            list(self.initializers.values()),
        )
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        return bytes(model.SerializeToString())


def encoder(shape: BertShape) -> bytes:
    """The graph from word embeddings to hidden states.

    words float32 [batch, tokens, hidden] (rows of the word table: it stays outside, so that it can
    lie in a mapped file that processes share), mask and types int64 [batch, tokens] -> hidden
    float32 [batch, tokens, hidden].
    """
    g = _Graph()
    width, eps = shape.hidden, shape.norm_eps
    size = g.op("Shape", ["mask"])
    tokens = g.op("Slice", [size, g.constant([1]), g.constant([2])])
    types = g.op("Gather", [g.weight(TYPES, [shape.token_types, width]), "types"])
    zero = g.constant([0])
    places = g.op("Slice", [g.weight(POSITIONS, [shape.positions, width]), zero, tokens, zero])
    x = g.op("Add", [g.op("Add", ["words", types]), places])
    x = g.norm(x, "embeddings.LayerNorm", width, eps)
    x = g.op("Reshape", [x, g.constant([-1, width])])
    bias = _mask_bias(g)
    split = g.op("Concat", [size, g.constant([shape.attention_heads, shape.head_dim])], axis=0)
    for layer in range(shape.layers):
        x = _layer(g, shape, layer, x, bias=bias, split=split)
    g.op("Reshape", [x, g.op("Concat", [size, g.constant([width])], axis=0)])
    dims: list[str | int] = ["batch", "tokens"]
    return g.model(
        {
            "words": (TensorProto.FLOAT, [*dims, width]),
            "mask": (TensorProto.INT64, dims),
            "types": (TensorProto.INT64, dims),
        },
        "hidden",
        [*dims, width],
    )


def _mask_bias(g: _Graph) -> str:
    """0 at real tokens and a number that no logit outweighs at padding, [batch, 1, 1, tokens]."""
    real = g.op("Cast", ["mask"], to=TensorProto.FLOAT)
    hidden = g.op("Sub", [real, g.constant(1.0, np.float32)])
    bias = g.op("Mul", [hidden, g.constant(1e30, np.float32)])
    return g.op("Unsqueeze", [bias, g.constant([1, 2])])


def _layer(g: _Graph, shape: BertShape, layer: int, x: str, *, bias: str, split: str) -> str:
    """One encoder layer over x [tokens of all rows, hidden].

    Plain operators: on CPUs the runtime's own attention operator was 1 % slower on short inputs
    and 4 % faster from 256 tokens on, and is not part of the standard.
    """
    at = f"encoder.layer.{layer}"
    width, eps = shape.hidden, shape.norm_eps
    query, key, value, out, up, down = layer_matrices(shape, layer).items()
    q = g.heads(g.linear(x, *query), split, [0, 2, 1, 3])
    k = g.heads(g.linear(x, *key), split, [0, 2, 3, 1])
    v = g.heads(g.linear(x, *value), split, [0, 2, 1, 3])
    scale = g.constant(shape.head_dim**-0.5, np.float32)
    logits = g.op("Add", [g.op("Mul", [g.op("MatMul", [q, k]), scale]), bias])
    mixed = g.op("MatMul", [g.op("Softmax", [logits], axis=-1), v])
    flat = g.op("Transpose", [mixed], perm=[0, 2, 1, 3])
    attended = g.linear(g.op("Reshape", [flat, g.constant([-1, width])]), *out)
    x = g.norm(g.op("Add", [attended, x]), f"{at}.attention.output.LayerNorm", width, eps)
    inner = g.activation(g.linear(x, *up), shape.activation)
    return g.norm(g.op("Add", [g.linear(inner, *down), x]), f"{at}.output.LayerNorm", width, eps)


def vocabulary(shape: BertShape) -> bytes:
    """The graph from hidden states to SPLADE vectors: log(1 + relu(max over tokens of the logits)).

    hidden float32 [batch, tokens, hidden], without padding (a row may repeat its own tokens) ->
    weights float32 [batch, vocab]. The logarithm and the decoder's bias come after the maximum,
    which they do not move: so the [tokens, vocab] block is written and read only once.
    """
    g = _Graph()
    width = shape.hidden
    size = g.op("Shape", ["hidden"])
    rows = g.op("Slice", [size, g.constant([0]), g.constant([2])])
    x = g.op("Reshape", ["hidden", g.constant([-1, width])])
    x = g.activation(g.linear(x, MLM_TRANSFORM, (width, width)), shape.activation)
    x = g.norm(x, MLM_NORM, width, shape.norm_eps)
    x = g.op("Gemm", [x, g.weight(f"{MLM_DECODER}.weight", [shape.vocab, width])], transB=1)
    x = g.op("Reshape", [x, g.op("Concat", [rows, g.constant([shape.vocab])], axis=0)])
    x = g.op("ReduceMax", [x, g.constant([1])], keepdims=0)
    x = g.op("Add", [x, g.weight(f"{MLM_DECODER}.bias", [shape.vocab])])
    g.op("Log", [g.op("Add", [g.op("Relu", [x]), g.constant(1.0, np.float32)])])
    return g.model(
        {"hidden": (TensorProto.FLOAT, ["batch", "tokens", width])},
        "weights",
        ["batch", shape.vocab],
    )
