"""The ONNX runtime: light, exact in float32, the default.

Loads a BERT checkpoint (config.json and safetensors: the graph is derived) or an exported `.onnx`
file, int8 ones too. Needs no torch. Options of a model:

    positive  label whose probability is the score, for cross-encoders with several classes
    output    name of the graph's output to use, for exported files with several

Owns the models that are loaded. Does not own the steps of a batch (`shoal.runtimes.encoder`).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, ClassVar

from shoal.core.types import TEXT_TASKS, Task
from shoal.errors import ModelUnavailable
from shoal.ipc.messages import ModelSpec, RunItem, Traits
from shoal.runtimes.checkpoint import locate
from shoal.runtimes.encoder import LoadedModel
from shoal.runtimes.heap import give_back
from shoal.runtimes.interface import RanItems

if TYPE_CHECKING:
    from shoal.runtimes.onnx.session import Session

USUAL_FILES = ("model.safetensors", "model.onnx", "onnx/model.onnx")


class OnnxRuntime:
    """Runs encoders through ONNX Runtime. Raises `RuntimeUnavailable` for a device it lacks."""

    name = "onnx"
    needs: ClassVar[dict[str, str]] = {"onnxruntime": "pip install onnxruntime"}
    tasks: ClassVar[tuple[Task, ...]] = TEXT_TASKS

    def __init__(self, *, device: str, threads: int) -> None:
        from shoal.runtimes.onnx.session import providers

        providers(device)  # a missing device is known now, not at the first load
        self.version = version("onnxruntime")
        self.traits = Traits(accepts_ids=True, tasks=list(self.tasks), host_tier=device == "cpu")
        self._device = device
        self._threads = threads
        self._models: dict[str, LoadedModel] = {}
        self._sessions: dict[str, list[Session]] = {}

    def load(self, spec: ModelSpec) -> bool:
        """Loads a checkpoint or a graph file; one that is loaded already is replaced."""
        from shoal.runtimes.onnx.networks import open_network, sessions_of

        path = locate(spec, USUAL_FILES)
        network = open_network(path, spec, device=self._device, threads=self._threads)
        self._models[spec.key] = LoadedModel(spec, network)
        self._sessions[spec.key] = sessions_of(network)
        return any(session.warm for session in self._sessions[spec.key])

    def unload(self, key: str, *, keep: bool = False) -> None:
        """Drops the model, its sessions and its mapped file, and gives the memory back."""
        if self._models.pop(key, None) is None:
            return
        for session in self._sessions.pop(key):
            session.leave(keep=keep)
        give_back()

    def run(self, key: str, items: Sequence[RunItem], block_tokens: int | None = None) -> RanItems:
        """Runs items of one loaded model."""
        model = self._models.get(key)
        if model is None:
            raise ModelUnavailable(f"{key} is not loaded")
        return model.run(items, block_tokens)

    def memory(self) -> dict[str, int]:
        """Bytes of each model's weights as they lie in memory or on the mapped file.

        The buffers that a batch needs on top belong to the process and are not in it.
        """
        return {key: model.memory_bytes for key, model in self._models.items()}
