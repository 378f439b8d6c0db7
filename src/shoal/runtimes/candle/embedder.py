"""Embedders on Candle, through the library `candding`.

It takes BERT and Qwen3 folders with safetensors, in float32, and computes on CPUs. The library
reads its pooling from the files beside the weights; here the entry decides, so it is given a view
of the folder: links to the files that it needs, and pooling files of our own. Owns the view,
refusing or cutting what is too long, and which texts share a pass. Does not own tokenising or the
network (the library's), or what is made of the vectors (`answers`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.core.batching import partition
from shoal.errors import (
    InvalidRequest,
    ModelUnavailable,
    ShoalError,
)
from shoal.ipc.messages import ModelSpec, RunItem
from shoal.runtimes.answers import Answers
from shoal.runtimes.candle.config import config_of
from shoal.runtimes.checkpoint import INDEX, locate
from shoal.runtimes.entities import Tags
from shoal.runtimes.inputs import too_long
from shoal.runtimes.interface import RanItems

Floats = npt.NDArray[np.float32]

_WEIGHTS = "model.safetensors"
_NEEDED = ("config.json", "tokenizer.json")
_ALSO = ("tokenizer_config.json", "special_tokens_map.json")
_POOLINGS = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}


class Embedder:
    """One model. Raises `ModelUnavailable` for what it could not serve."""

    def __init__(self, spec: ModelSpec) -> None:
        import candding
        from tokenizers import Tokenizer

        self._spec = spec
        self._answers = Answers(spec, {}, None, Tags.read(()))
        _check(spec)
        weights = locate(spec, (_WEIGHTS, f"model{INDEX}"))
        with TemporaryDirectory(prefix="shoal-candle-") as folder:
            view = Path(folder)
            self.memory_bytes = _fill(view, weights, spec)
            try:
                self._tokenizer: Any = Tokenizer.from_file(str(view / "tokenizer.json"))
                self._network: Any = candding.TextEmbedding(
                    *(folder,),
                    device="cpu",
                    dtype="f32",
                    max_length=spec.max_tokens,
                    normalize=False,
                )
            except candding.CanddingError as error:
                raise ModelUnavailable(f"{spec.key}: {error}") from error
        if self._network.max_length < spec.max_tokens:
            raise ModelUnavailable(
                f"{spec.key}: max_tokens is {spec.max_tokens}, and the network takes "
                f"{self._network.max_length}"
            )
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def run(self, items: Sequence[RunItem], block_tokens: int | None) -> RanItems:
        """An outcome for each item, in order; equal texts are computed once."""
        budget_tokens = self._spec.batch_tokens if block_tokens is None else block_tokens
        rows: dict[str, int] = {}
        lengths: list[int] = []
        plans: list[list[int] | ShoalError] = []
        for item in items:
            try:
                tokens = self._lengths(item)
            except ShoalError as error:
                plans.append(error)
                continue
            for text, length in zip(item.texts, tokens, strict=True):
                if text not in rows:
                    rows[text] = len(rows)
                    lengths.append(length)
            plans.append([rows[text] for text in item.texts])
        vectors, padded_tokens = self._embed(list(rows), lengths, budget_tokens)
        outcomes = [
            plan if isinstance(plan, ShoalError) else self._answers.of_vectors(item, vectors[plan])
            for item, plan in zip(items, plans, strict=True)
        ]
        return RanItems(outcomes, padded_tokens)

    def _lengths(self, item: RunItem) -> list[int]:
        """Tokens of each text, at most those that the model takes. Raises a `ShoalError`."""
        if item.adapter:
            raise ModelUnavailable(f"{item.adapter} is not loaded")
        if item.task not in self._spec.tasks:
            raise InvalidRequest(f"{self._spec.key} does not {item.task}", param="model")
        if item.task == "encode":
            self._answers.outputs(item)
        if not item.texts:
            raise InvalidRequest("this model takes texts")
        most = self._spec.max_tokens
        lengths = [len(self._tokenizer.encode(text).ids) for text in item.texts]
        for index, length in enumerate(lengths):
            if length > most and not item.params.truncate:
                raise too_long(item, index, length, most)
        return [min(length, most) for length in lengths]

    def _embed(
        self, texts: list[str], lengths: list[int], budget_tokens: int
    ) -> tuple[Floats, int]:
        """Vectors [texts, d], pooled and not scaled, and the tokens computed with padding."""
        vectors = np.empty((len(texts), self._network.dim), np.float32)
        padded_tokens = 0
        every = [sorted(range(len(texts)), key=lengths.__getitem__)] if texts else []
        for group in partition(lengths, budget_tokens) if budget_tokens else every:
            vectors[group] = self._network.embed([texts[i] for i in group], batch_size=len(group))
            padded_tokens += max(lengths[i] for i in group) * len(group)
        return vectors, padded_tokens


def _check(spec: ModelSpec) -> None:
    if set(spec.outputs) - {"dense"} or spec.heads or spec.scorer != "similarity":
        raise ModelUnavailable(
            f"{spec.key}: the candle runtime gives dense vectors and their similarity, nothing else"
        )
    if spec.pooling not in _POOLINGS:
        raise ModelUnavailable(
            f"{spec.key}: the candle runtime pools by {', '.join(_POOLINGS)}, not {spec.pooling}"
        )


def _fill(view: Path, weights: Path, spec: ModelSpec) -> int:
    """Makes the folder that the library reads; returns the bytes of the weights.

    Nothing but these files is in it: of a folder with a pickle, that is not seen.
    """
    folder = weights.parent
    for name in _NEEDED:
        if not (folder / name).is_file():
            raise ModelUnavailable(f"{spec.key}: {folder} has no {name}")
    names = [name for name in ("tokenizer.json", *_ALSO) if (folder / name).is_file()]
    links = {name: folder / name for name in names}
    parts = [weights]
    if weights.name.endswith(INDEX):
        links[f"model{INDEX}"] = weights
        parts = sorted(folder.glob("*.safetensors"))
        links |= {part.name: part for part in parts}
    elif weights.suffix == ".safetensors":
        links[_WEIGHTS] = weights
    else:
        raise ModelUnavailable(f"{spec.key}: {weights} is no safetensors file")
    config = config_of(folder)
    (view / "config.json").write_text(json.dumps(config), "utf-8")
    for name, target in links.items():
        (view / name).symlink_to(target.resolve())
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        },
    ]
    (view / "modules.json").write_text(json.dumps(modules), "utf-8")
    pooling = {
        f"pooling_mode_{name}": name == _POOLINGS[spec.pooling] for name in _POOLINGS.values()
    }
    (view / "1_Pooling").mkdir()
    (view / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": config.get("hidden_size"), **pooling}), "utf-8"
    )
    return sum(part.stat().st_size for part in parts)
