"""The torch runtime: BERT checkpoints in PyTorch, packed on the CPU. Needs no transformers.

Options of a model:

    packing   true, false or auto (the default): run sequences end to end instead of padded;
              auto packs on the CPU
    positive  label whose probability is the score, for cross-encoders with several classes

Owns the models that are loaded. Does not own the steps of a batch (`shoal.runtimes.encoder`).
Importing this module does not import torch; making the runtime does. CUDA has not been tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import ClassVar

from shoal.core.types import TEXT_TASKS
from shoal.errors import ModelUnavailable, RuntimeUnavailable
from shoal.ipc.messages import ModelSpec, RunItem, Traits
from shoal.runtimes.checkpoint import locate
from shoal.runtimes.encoder import LoadedModel
from shoal.runtimes.heap import give_back
from shoal.runtimes.interface import RanItems

USUAL_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


class TorchRuntime:
    """Runs encoders through torch. Raises `RuntimeUnavailable` for a device it lacks."""

    name = "torch"
    needs: ClassVar[dict[str, str]] = {"torch": "pip install 'shoal[torch]'"}

    def __init__(self, *, device: str, threads: int) -> None:
        import torch

        from shoal.runtimes.torch.linear import choose

        if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
            raise RuntimeUnavailable(f"torch cannot use {device} here; it has the CPU")
        torch.set_num_threads(threads)
        self.version = version("torch")
        self._device = device
        self._packs = device == "cpu"
        self._linear = choose(device)
        self.traits = Traits(accepts_ids=True, tasks=list(TEXT_TASKS), packing=self._packs)
        self._models: dict[str, LoadedModel] = {}

    def load(self, spec: ModelSpec) -> bool:
        """Loads a checkpoint; one that is loaded already is replaced. Nothing is ever kept."""
        from shoal.runtimes.torch.network import TorchTransformer

        path = locate(spec, USUAL_FILES)
        network = TorchTransformer(
            path, spec, device=self._device, linear=self._linear, packs=self._packs_model(spec)
        )
        self._models[spec.key] = LoadedModel(spec, network)
        return False

    def _packs_model(self, spec: ModelSpec) -> bool:
        chosen = spec.options.get("packing", "auto")
        if chosen not in (True, False, "auto"):
            raise ModelUnavailable(f"{spec.key}: option packing is true, false or auto")
        return self._packs if chosen == "auto" else bool(chosen)

    def unload(self, key: str, *, keep: bool = False) -> None:  # noqa: ARG002 - see below
        """Drops the model and gives its memory back, on CUDA to the device.

        Nothing has to be kept: the weights lie on the mapped file, whose pages stay in the
        system's cache, and a load takes what its trial run takes.
        """
        if self._models.pop(key, None) is not None:
            give_back()

    def run(self, key: str, items: Sequence[RunItem], block_tokens: int | None = None) -> RanItems:
        """Runs items of one loaded model."""
        model = self._models.get(key)
        if model is None:
            raise ModelUnavailable(f"{key} is not loaded")
        return model.run(items, block_tokens)

    def memory(self) -> dict[str, int]:
        """Bytes of each model's weights, which on the CPU lie on the mapped file.

        The buffers that a batch needs on top belong to the process and are not in it.
        """
        return {key: model.memory_bytes for key, model in self._models.items()}
