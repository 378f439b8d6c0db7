"""The classification head of a checkpoint, over one pooled vector of a text or a pair.

Owns reading it by its family's names. Does not own computing it: it is a `Head`, numpy, like the
heads of a catalog entry, and computed in float32 whatever the network's precision is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.errors import ModelUnavailable
from shoal.ipc.messages import ModelSpec
from shoal.runtimes.bert import labels_of, positive_of
from shoal.runtimes.heads import Head, Layer, as_float32, called
from shoal.runtimes.torch.shape import Part, Plan
from shoal.runtimes.torch.tensors import Tensors


def classifier_of(
    tensors: Tensors, plan: Plan, config: Mapping[str, Any], spec: ModelSpec
) -> Head | None:
    """The head of a sequence classifier; None where the architecture is no such.

    The score's class is the option `positive`, or the second of two.
    """
    named = config.get("architectures") or []
    names = plan.classifier
    if names is None or not any("ForSequenceClassification" in str(name) for name in named):
        return None
    norm = None
    if names.norm is not None:
        norm = _layer(tensors, names.norm)
    layers = tuple(_layer(tensors, part) for part in (names.dense, names.out) if part is not None)
    wide = plan.shape.hidden
    for weight, _ in layers:
        if weight.ndim != 2 or weight.shape[1] != wide:
            raise ModelUnavailable(f"{spec.key}: its classifier does not read {wide} numbers")
    labels = called(labels_of(config, len(layers[-1][1])), spec.labels, spec.key)
    return Head(
        layers,
        labels,
        names.activation,
        positive=positive_of(labels, spec),
        independent=config.get("problem_type") == "multi_label_classification",
        pooling=names.pooling,
        norm=norm,
        norm_eps=plan.shape.norm_eps,
    )


def _layer(tensors: Tensors, part: Part) -> Layer:
    weight = as_float32(tensors.array(f"{part.stored}.weight"))
    if not part.bias:
        return weight, np.zeros(len(weight), np.float32)
    return weight, as_float32(tensors.array(f"{part.stored}.bias"))
