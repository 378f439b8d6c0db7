"""The code paths of the ONNX runtime, by name.

Owns the names and what each is for. Does not own how one is found from files (`networks`).
"""

from __future__ import annotations

ABOUT = {
    "bert": "BERT-like encoders with a masked-language head or a classifier of texts or tokens",
    "graph": "an exported ONNX graph of an encoder, a cross-encoder or a classifier",
    "static": "static embeddings (Model2Vec): the mean of a table's rows, no forward pass",
}
