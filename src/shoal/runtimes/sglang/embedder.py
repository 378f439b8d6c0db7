"""Vectors from a server: `/encode`, with its sequences tokenised and measured here.

Owns refusing or cutting what is too long, and which outcome is whose. Does not own the call
(`contract`) or what is made of the vectors (`answers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelUnavailable,
    ShoalError,
)
from shoal.ipc.messages import ModelSpec, RunItem
from shoal.runtimes.answers import Answers
from shoal.runtimes.entities import Tags
from shoal.runtimes.inputs import too_long
from shoal.runtimes.interface import RanItems
from shoal.wire.envelope import Result

Encode = Callable[[list[list[int]]], list[list[float]]]


class Embedder:
    """One encoder. encode: calls its server. most: the longest sequence that it takes, tokens."""

    def __init__(self, spec: ModelSpec, folder: Path, most: int, encode: Encode) -> None:
        from tokenizers import Tokenizer

        self._spec = spec
        self._most = most
        self._encode = encode
        self._answers = Answers(spec, {}, None, Tags.read(()))
        self._tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()

    def run(self, items: Sequence[RunItem]) -> RanItems:
        """An outcome for each item, in order, from one call."""
        plans: list[list[list[int]] | ShoalError] = []
        for item in items:
            try:
                plans.append(self._sequences(item))
            except ShoalError as error:
                plans.append(error)
        asked = [ids for plan in plans if not isinstance(plan, ShoalError) for ids in plan]
        try:
            rows = iter(self._encode(asked) if asked else [])
        except DeadlineExceeded as error:
            # Not raised: each half of the batch would be tried alone, and wait as long again.
            return RanItems([plan if isinstance(plan, ShoalError) else error for plan in plans], 0)
        outcomes: list[Result | ShoalError] = []
        for item, plan in zip(items, plans, strict=True):
            if isinstance(plan, ShoalError):
                outcomes.append(plan)
            else:
                vectors = np.array([next(rows) for _ in plan], np.float32)
                outcomes.append(self._answers.of_vectors(item, vectors))
        return RanItems(outcomes, sum(map(len, asked)))

    def _sequences(self, item: RunItem) -> list[list[int]]:
        """The ids of each text of an item. Raises a `CallerError`."""
        if item.task != "encode":
            raise InvalidRequest(f"{self._spec.key} does not {item.task}", param="model")
        if item.adapter:
            raise ModelUnavailable(f"{item.adapter} is not loaded: SGLang's encoders take none")
        self._answers.outputs(item)
        if item.params.normalize is False:
            raise InvalidRequest("SGLang gives vectors of length 1 only", param="normalize")
        found = []
        for index, text in enumerate(item.texts):
            self._tokenizer.no_truncation()
            if item.params.truncate:
                self._tokenizer.enable_truncation(self._most)
            ids: list[int] = self._tokenizer.encode(text).ids
            if len(ids) > self._most:
                raise too_long(item, index, len(ids), self._most)
            found.append(ids)
        return found
