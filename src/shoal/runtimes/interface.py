"""The contract between a runtime and the process that hosts it.

A runtime is used by one thread at a time. It knows nothing of queues, sockets or policies: the
host (`shoal.runtimes.host`) reads calls, measures memory and maps what a runtime raises.

Outcomes are per item: `run` returns one `Result` or one `ShoalError` for each item, in order. A
runtime raises only when the whole batch is lost (the host then splits it to find the culprit). An
error that is about one input says which by `input_index`: where the item is `partial`, the host
then runs each of its inputs by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.errors import ShoalError
from shoal.ipc.messages import AdapterSpec, ModelSpec, RunItem, Traits
from shoal.wire.envelope import Result
from shoal.wire.generation import Generated, Piece

Emit = Callable[[Piece | Generated | ShoalError], None]


@dataclass(frozen=True, slots=True)
class RanItems:
    """What a batch gave: an outcome per item, in order, and the tokens computed with padding."""

    outcomes: list[Result | ShoalError]
    padded_tokens: int


class Runtime(Protocol):
    """Loads models and runs batches of one model.

    `load` raises `ModelUnavailable` (files, formats), `RuntimeUnavailable` (a missing library) or
    `OutOfMemory`, and leaves nothing behind when it raises. `unload` of a model that is not loaded
    does nothing. `memory` gives the bytes of each loaded model by the runtime's own count, or an
    empty mapping where it has none.
    """

    name: str
    version: str
    traits: Traits

    def load(self, spec: ModelSpec) -> bool:
        """Makes the model ready to run; whether what an earlier `unload` kept made it quicker."""

    def unload(self, key: str, *, keep: bool = False) -> None:
        """Forgets the model; its memory is free afterwards.

        keep: a runtime with the trait `host_tier` leaves what makes the next load quick, in memory
        that the system can take back at any time; without it, nothing of the model stays.
        """

    def run(self, key: str, items: Sequence[RunItem], block_tokens: int | None = None) -> RanItems:
        """Runs items of one loaded model.

        block_tokens: as in `Run`; a runtime that pads nothing, or tokenises itself, passes it over.
        """

    def memory(self) -> dict[str, int]:
        """Bytes of each loaded model."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a loaded model can generate at once; see `shoal.ipc.messages.Loaded`."""

    slots: int
    kv_tokens: int = 0


class Generator(Protocol):
    """What a runtime with the trait `streams` has besides: it batches by itself, token by token.

    A worker loads no more than one generating model into a process, and starts no more than
    `Capacity.slots` items at once.
    """

    def capacity(self, key: str) -> Capacity:
        """Of a loaded model."""

    def start(self, key: str, item: RunItem, emit: Emit) -> None:
        """Begins to generate and returns at once; `emit` may be called from any thread.

        It gets pieces where the item's `Generation.stream` asks for them, in order, then once the
        whole text or the error of this item; nothing after that, and never an exception. What is
        wrong with the item may also be raised here, before anything was emitted. An engine that
        is lost takes the process along: the worker sees that, and starts another.
        """

    def stop(self, item: str) -> None:
        """Ends an item early, from any thread; one that is not there is passed over.

        Its slot is free at once; `emit` gets a `Generated` with the reason `cancelled`.
        """


class Adapting(Protocol):
    """What a runtime with the trait `lora` has besides. Called by the thread that calls `run`."""

    def load_adapter(self, key: str, adapter: AdapterSpec) -> int:
        """Makes an adapter of a loaded model ready; the bytes that it takes.

        Raises `ModelUnavailable` for one that is not whole, or was made for another model, and
        leaves nothing behind then.
        """

    def unload_adapter(self, key: str, adapter: str) -> None:
        """Forgets an adapter by its key; one that is not there is passed over."""


class RuntimeFactory(Protocol):
    """What the entry-point group `shoal.runtimes` names: makes a runtime in its own process.

    `threads` is the number of threads it may use; `device` is `cpu` or `cuda:<n>`.
    Raises `RuntimeUnavailable` where its library is not installed.
    """

    def __call__(self, *, device: str, threads: int) -> Runtime:
        """A runtime with nothing loaded."""
