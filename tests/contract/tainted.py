"""Models that are at fault: in some of their numbers, or in their files.

Owns making them, in a folder of the test's. Holds no claim.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from msgspec.structs import replace
from onnx import TensorProto, helper
from tokenizers import Tokenizer, models, pre_tokenizers

from shoal.catalog.schema import Entry, Output
from tests.support.lazy import Lazy
from tests.support.runtime_models import save_tiny

torch = Lazy("torch")
transformers = Lazy("transformers")

WORD = 13


def tainted_encoder(like: Entry, folder: Path) -> Entry:
    """A small BERT whose vector of the word `w13` is not a number, run as `like` is."""
    save_tiny(transformers.BertModel, folder)
    network = transformers.BertModel.from_pretrained(folder)
    with torch.no_grad():
        network.embeddings.word_embeddings.weight[WORD] = torch.nan
    network.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(120)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    return replace(
        like,
        id="tainted",
        source=folder.as_uri(),
        max_tokens=32,
        outputs={"dense": Output(32)},
    )


def tainted_graph(like: Entry, folder: Path) -> Entry:
    """A classifier of pictures by the square root of their brightness, which black lacks."""
    folder.mkdir(exist_ok=True)
    nodes = [
        helper.make_node("ReduceMean", ["pixels"], ["mean"], axes=[1, 2, 3], keepdims=0),
        helper.make_node("Unsqueeze", ["mean", "last"], ["column"]),
        helper.make_node("Sqrt", ["column"], ["root"]),
        helper.make_node("Neg", ["root"], ["minus"]),
        helper.make_node("Concat", ["root", "minus"], ["logits"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "roots",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["n", 8, 8, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor("last", TensorProto.INT64, [1], [1])],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(made, str(folder / "model.onnx"))
    return replace(
        like,
        id="tainted",
        source=folder.as_uri(),
        weights="model.onnx",
        options={"preparation": "imagenet"},
    )


def damaged(folder: str, to: Path, weights: str) -> Path:
    """A copy of a model's folder (links) whose file of weights ends in the middle."""
    for path in Path(folder).rglob("*"):
        here = to / path.relative_to(folder)
        if path.is_dir():
            continue
        here.parent.mkdir(parents=True, exist_ok=True)
        if path.relative_to(folder).as_posix() == weights:
            here.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        else:
            here.symlink_to(path)
    return to
