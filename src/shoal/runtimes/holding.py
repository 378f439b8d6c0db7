"""What runtimes have in common whose models answer item by item: holding them, and one's own fault.

Owns the models that are loaded, giving memory back, and one outcome per item. Does not own what a
model computes: a subclass opens it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Protocol, TypeVar

from shoal.errors import (
    CallerError,
    InvalidRequest,
    ModelUnavailable,
    RuntimeUnavailable,
    ShoalError,
)
from shoal.ipc.messages import ModelSpec, RunItem, Traits
from shoal.runtimes.heap import give_back
from shoal.runtimes.interface import RanItems
from shoal.wire.envelope import Result

Outcomes = list[Result | ShoalError]
Input = TypeVar("Input")
Found = TypeVar("Found")


class Model(Protocol):
    """A loaded model. memory_bytes: of its weights as they lie in memory or on a mapped file."""

    memory_bytes: int

    def run(self, items: Sequence[RunItem]) -> Outcomes:
        """One outcome per item, in order."""


class HoldingRuntime:
    """A runtime whose models pad nothing, and read their inputs themselves."""

    name: str
    version: str

    def __init__(self, traits: Traits, *, device: str, threads: int) -> None:
        self.traits = traits
        self._device = device
        self._threads = threads
        self._models: dict[str, Model] = {}

    def open(self, spec: ModelSpec) -> Model:
        """A model, ready to run. Raises as `load` does."""
        raise NotImplementedError

    def load(self, spec: ModelSpec) -> bool:
        """Loads a model; one that is loaded already is replaced. Nothing is ever kept of one."""
        self._models[spec.key] = self.open(spec)
        return False

    def unload(self, key: str, *, keep: bool = False) -> None:
        """Drops the model and gives its memory back."""
        del keep  # there is no host tier
        if self._models.pop(key, None) is not None:
            give_back()

    def run(self, key: str, items: Sequence[RunItem], block_tokens: int | None = None) -> RanItems:
        """Runs items of one loaded model."""
        del block_tokens  # nothing is padded
        model = self._models.get(key)
        if model is None:
            raise ModelUnavailable(f"{key} is not loaded")
        return RanItems(model.run(items), sum(sum(item.lengths) for item in items))

    def memory(self) -> dict[str, int]:
        """Bytes of each model's weights; what a batch needs on top is not in it."""
        return {key: model.memory_bytes for key, model in self._models.items()}


def demand(what: str, needs: Mapping[str, str]) -> None:
    """Raises `RuntimeUnavailable` for the first library that is not installed, with its cure."""
    for library, cure in needs.items():
        if find_spec(library) is None:
            raise RuntimeUnavailable(f"{what}: {library} is not installed: {cure}")


def each(items: Sequence[RunItem], answer: Callable[[RunItem], Result]) -> Outcomes:
    """What `answer` makes of every item; an error is that item's own."""
    outcomes: Outcomes = []
    for item in items:
        try:
            outcomes.append(answer(item))
        except ShoalError as error:
            outcomes.append(error)
    return outcomes


def each_blob(item: RunItem, read: Callable[[bytes], Found]) -> list[Found]:
    """What `read` makes of every file of an item; a caller's error names the input.

    Raises `InvalidRequest` for an item without files.
    """
    return _each_input(item.blobs, "this model takes files, and a text was sent", read)


def each_text(item: RunItem, read: Callable[[str], Found]) -> list[Found]:
    """What `read` makes of every text of an item, as `each_blob` does of files."""
    return _each_input(item.texts, "this model takes texts, and a file was sent", read)


def _each_input(inputs: Sequence[Input], none: str, read: Callable[[Input], Found]) -> list[Found]:
    if not inputs:
        raise InvalidRequest(none)
    found = []
    for index, one in enumerate(inputs):
        try:
            found.append(read(one))
        except CallerError as error:
            if error.param is None:  # it is about this input, not about a parameter
                error.input_index = index
            raise
    return found
