"""The runtime `candle`: embeddings through the library `candding`, generation through `mistralrs`.

Owns which of the two a model is for, and the threads that their engines may use. Imports neither:
a model pays for its own engine only. Does not own vectors (`embedder`) or texts (`generator`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import version
from typing import ClassVar

from shoal.core.types import Task
from shoal.errors import InvalidRequest, ModelUnavailable, RuntimeUnavailable
from shoal.ipc.facts import Adapts
from shoal.ipc.messages import AdapterSpec, ModelSpec, RunItem, Traits
from shoal.runtimes.candle.embedder import Embedder
from shoal.runtimes.candle.generator import TextGenerator
from shoal.runtimes.heap import give_back
from shoal.runtimes.interface import Capacity, Emit, RanItems

_CURE = "shoal bundles build candle"
# Read by the engines when they first compute. Waiting threads of a barrier sleep almost at once:
# where processes share cores, those that spin keep the one that is waited for from running.
_THREADS = ("RAYON_NUM_THREADS", "CANDLE_NUM_THREADS")
_FIXED = {
    "TOKIO_WORKER_THREADS": "1",
    "CANDLE_BARRIER_POOL_SPIN_LIMIT": "1",
    "MISTRALRS_CPU_KV_F32": "1",  # what is kept of a text is as exact as what is computed
    "RUST_LOG": "warn",
}


class CandleRuntime:
    """Runs embedders and generators. Raises `RuntimeUnavailable` for a device that is no CPU."""

    name = "candle"
    needs: ClassVar[dict[str, str]] = dict.fromkeys(
        ("candding", "tokenizers", "mistralrs", "jinja2", "gguf"), _CURE
    )
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    tasks: ClassVar[tuple[Task, ...]] = ("encode", "score", "generate")
    adapts: ClassVar[Adapts] = Adapts(tasks=["generate"], bare_weights=[".gguf"])

    def __init__(self, *, device: str, threads: int) -> None:
        if device.partition(":")[0] != "cpu":
            raise RuntimeUnavailable(f"the candle runtime computes on CPUs, not on {device}")
        for name, value in (*((name, str(threads)) for name in _THREADS), *_FIXED.items()):
            os.putenv(name, value)
        self.version = f"{version('candding')}, {version('mistralrs')}"
        self.traits = Traits(accepts_ids=False, tasks=list(self.tasks), lora=True, streams=True)
        self._models: dict[str, Embedder] = {}
        self._generators: dict[str, TextGenerator] = {}

    def load(self, spec: ModelSpec) -> bool:
        """Loads a checkpoint; one that is loaded already is replaced. Nothing is ever kept of one.

        Raises `ModelUnavailable`.
        """
        if "generate" in spec.tasks:
            self._generators[spec.key] = TextGenerator(spec)
        else:
            self._models[spec.key] = Embedder(spec)
        return False

    def unload(self, key: str, *, keep: bool = False) -> None:
        """Drops the model and gives its memory back; texts that still grow are cancelled."""
        del keep  # there is no host tier
        generator = self._generators.pop(key, None)
        if generator is not None:
            generator.close()
        if generator is not None or self._models.pop(key, None) is not None:
            del generator
            give_back()

    def run(self, key: str, items: Sequence[RunItem], block_tokens: int | None = None) -> RanItems:
        """Runs items of one loaded embedder."""
        model = self._models.get(key)
        if key in self._generators:
            return RanItems(
                [InvalidRequest(f"{key} only generates", param="model")] * len(items), 0
            )
        if model is None:
            raise ModelUnavailable(f"{key} is not loaded")
        return model.run(items, block_tokens)

    def capacity(self, key: str) -> Capacity:
        """What a loaded generator takes at once."""
        return self._generator(key).capacity

    def start(self, key: str, item: RunItem, emit: Emit) -> None:
        """Begins to generate."""
        self._generator(key).start(item, emit)

    def stop(self, item: str) -> None:
        """Ends an item early."""
        for generator in list(self._generators.values()):
            generator.stop(item)

    def load_adapter(self, key: str, adapter: AdapterSpec) -> int:
        """Makes an adapter of a generator ready; its bytes. Raises `ModelUnavailable`."""
        if key in self._models:
            raise ModelUnavailable(f"{key}: the candle runtime takes no adapters for embedders")
        return self._generator(key).load_adapter(adapter)

    def unload_adapter(self, key: str, adapter: str) -> None:
        """Forgets an adapter."""
        if key in self._generators:
            self._generators[key].unload_adapter(adapter)

    def memory(self) -> dict[str, int]:
        """Bytes of each model's weights."""
        models: dict[str, Embedder | TextGenerator] = {**self._models, **self._generators}
        return {key: model.memory_bytes for key, model in models.items()}

    def _generator(self, key: str) -> TextGenerator:
        generator = self._generators.get(key)
        if generator is None:
            raise ModelUnavailable(f"{key} is not loaded, or it does not generate")
        return generator
