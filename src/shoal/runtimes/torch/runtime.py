"""The torch runtime: text transformers and image networks in PyTorch. Needs no transformers.

Options of a model:

    dtype     float32 (the default), bfloat16, float16, or auto (what config.json says): precision
              of weights and numbers; an item whose numbers are not finite is run in float32 again
    packing   true, false or auto (the default): run sequences end to end instead of padded;
              auto measures which is faster
    positive  label whose probability is the score, for cross-encoders with several classes

Text transformers take LoRA adapters; items of one batch may name several.

Owns the models that are loaded, and which adapters they have. Does not own the steps of a batch
(`shoal.runtimes.encoder`) or what runs a checkpoint (`families`, `network`, `adapters`). Importing
this module does not import torch; making the runtime does. CUDA has not been tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shoal.core.types import TEXT_TASKS, Task
from shoal.errors import ModelUnavailable, RunFailed, RuntimeUnavailable
from shoal.ipc.facts import Adapts
from shoal.ipc.messages import AdapterSpec, ModelSpec, RunItem, Traits
from shoal.runtimes.adapters import AdapterFile, read_adapter
from shoal.runtimes.bert import read_config
from shoal.runtimes.checkpoint import locate
from shoal.runtimes.encoder import LoadedModel
from shoal.runtimes.heap import give_back
from shoal.runtimes.interface import RanItems
from shoal.runtimes.torch.families import IMAGES, OWN

if TYPE_CHECKING:
    import torch

    from shoal.runtimes.torch.network import TorchTransformer
    from shoal.runtimes.torch.pictures import LoadedPictures

USUAL_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


class TorchRuntime:
    """Runs networks through torch. Raises `RuntimeUnavailable` for a device it lacks."""

    name = "torch"
    needs: ClassVar[dict[str, str]] = {"torch": "pip install 'shoal[torch]'"}
    tasks: ClassVar[tuple[Task, ...]] = TEXT_TASKS
    adapts: ClassVar[Adapts] = Adapts(bare_families=[*IMAGES, *OWN])

    def __init__(self, *, device: str, threads: int) -> None:
        import torch

        from shoal.runtimes.torch.linear import choose

        if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
            raise RuntimeUnavailable(f"torch cannot use {device} here; it has the CPU")
        torch.set_num_threads(threads)
        self.version = version("torch")
        self._device = device
        self._threads = threads
        self._linear = choose(device)
        self.traits = Traits(
            accepts_ids=True, tasks=list(self.tasks), packing=device == "cpu", lora=True
        )
        self._models: dict[str, LoadedModel | LoadedPictures] = {}
        self._adapted: dict[str, _Adapted] = {}
        self._lower: set[str] = set()

    def load(self, spec: ModelSpec) -> bool:
        """Loads a checkpoint; one that is loaded already is replaced. Nothing is ever kept."""
        import torch

        path = locate(spec, USUAL_FILES)
        if spec.family in IMAGES:
            return self._load_pictures(spec, path)
        if spec.family in OWN:
            return self._load_own(spec, path)
        dtype = _dtype(spec, path)
        packing = spec.options.get("packing", "auto")
        if packing not in (True, False, "auto"):
            raise ModelUnavailable(f"{spec.key}: option packing is true, false or auto")
        network = self._network(spec, path, dtype)
        model = LoadedModel(spec, network)
        if packing == "auto":
            network.packs = self._packs(spec, network, dtype)
        else:
            network.packs = bool(packing)
        self._models[spec.key] = model
        self._adapted[spec.key] = _Adapted(model, network, keeps=dtype != torch.float32)
        self._lower.discard(spec.key)
        if dtype != torch.float32:
            self._lower.add(spec.key)
        return False

    def _load_pictures(self, spec: ModelSpec, path: Path) -> bool:
        from shoal.runtimes.torch.pictures import LoadedPictures

        self._models[spec.key] = LoadedPictures(spec, path, device=self._device)
        self._adapted.pop(spec.key, None)
        self._lower.discard(spec.key)
        return False

    def _load_own(self, spec: ModelSpec, path: Path) -> bool:
        from shoal.runtimes.torch.nanochat import NanochatClassifier

        network = NanochatClassifier(path, spec, device=self._device, linear=self._linear)
        self._models[spec.key] = LoadedModel(spec, network)
        self._adapted.pop(spec.key, None)
        self._lower.discard(spec.key)
        return False

    def _network(self, spec: ModelSpec, path: Path, dtype: torch.dtype) -> TorchTransformer:
        from shoal.runtimes.torch.network import TorchTransformer

        return TorchTransformer(
            path, spec, device=self._device, linear=self._linear, packs=True, dtype=dtype
        )

    def _packs(self, spec: ModelSpec, network: TorchTransformer, dtype: torch.dtype) -> bool:
        """Packed or padded: by a trial on the CPU; on CUDA packed where it is one kernel."""
        from shoal.runtimes.torch.layout import packs_better

        if self._device != "cpu":
            return network.varlen
        facts = f"{spec.key} {spec.batch_tokens} {self.version} {self._threads} {dtype}"
        return packs_better(network, spec.batch_tokens, Path(spec.cache_dir), facts)

    def unload(self, key: str, *, keep: bool = False) -> None:  # noqa: ARG002 - see below
        """Drops the model and gives its memory back, on CUDA to the device.

        Nothing has to be kept: the weights lie on the mapped file, whose pages stay in the
        system's cache, and a load takes what its trial run takes.
        """
        if self._models.pop(key, None) is not None:
            self._lower.discard(key)
            self._adapted.pop(key, None)
            give_back()

    def load_adapter(self, key: str, adapter: AdapterSpec) -> int:
        """Takes an adapter in PEFT's form, in the place of one of the same key; its bytes.

        They are in `memory` as the model's. Raises `ModelUnavailable` as the contract says.
        """
        if key not in self._models:
            raise ModelUnavailable(f"{key} is not loaded")
        if key not in self._adapted:
            raise ModelUnavailable(f"{adapter.key}: the family of {key} takes no adapters")
        return self._adapted[key].take(adapter)

    def unload_adapter(self, key: str, adapter: str) -> None:
        """Drops an adapter; the next one takes its memory."""
        if key in self._adapted:
            self._adapted[key].drop(adapter)

    def run(self, key: str, items: Sequence[RunItem], block_tokens: int | None = None) -> RanItems:
        """Runs items of one loaded model; what overflowed in lower precision, in float32 again."""
        model = self._models.get(key)
        if model is None:
            raise ModelUnavailable(f"{key} is not loaded")
        ran = model.run(items, block_tokens)
        failed = [at for at, outcome in enumerate(ran.outcomes) if isinstance(outcome, RunFailed)]
        if not failed or key not in self._lower:
            return ran
        return self._in_float32(model.spec, items, ran, failed)

    def _in_float32(
        self, spec: ModelSpec, items: Sequence[RunItem], ran: RanItems, failed: Sequence[int]
    ) -> RanItems:
        """Runs the failed items in float32, through a network that is made for them and dropped.

        On the CPU a float32 checkpoint costs no memory for it: its tensors lie on the mapped file.
        """
        import torch

        network = self._network(spec, locate(spec, USUAL_FILES), torch.float32)
        network.packs = self._device == "cpu"
        model = LoadedModel(spec, network)
        adapted = _Adapted(model, network, keeps=False)
        for key in {items[at].adapter for at in failed} - {""}:
            adapted.put(key, self._adapted[spec.key].files[key])
        again = model.run([items[at] for at in failed])
        outcomes = list(ran.outcomes)
        for at, outcome in zip(failed, again.outcomes, strict=True):
            outcomes[at] = outcome
        return RanItems(outcomes, ran.padded_tokens + again.padded_tokens)

    def memory(self) -> dict[str, int]:
        """Bytes of each model's weights, which on the CPU lie on the mapped file.

        The buffers that a batch needs on top belong to the process and are not in it.
        """
        return {key: model.memory_bytes for key, model in self._models.items()}


class _Adapted:
    """A model that takes adapters.

    files: those that it has, in float32, where `keeps`: their folders may meanwhile have others.
    """

    def __init__(self, model: LoadedModel, network: TorchTransformer, *, keeps: bool) -> None:
        self._model = model
        self._network = network
        self._keeps = keeps
        self.files: dict[str, AdapterFile] = {}

    def take(self, adapter: AdapterSpec) -> int:
        """Reads it and makes it ready; its bytes."""
        file = read_adapter(adapter)
        size_bytes = self.put(adapter.key, file)
        if self._keeps:
            self.files[adapter.key] = file
            size_bytes += file.nbytes
        return size_bytes

    def put(self, key: str, file: AdapterFile) -> int:
        """Makes it ready; the bytes that the network has of it."""
        size_bytes = self._network.load_adapter(key, file)
        self._model.adapters.add(key)
        return size_bytes

    def drop(self, adapter: str) -> None:
        """Forgets it."""
        self._network.unload_adapter(adapter)
        self.files.pop(adapter, None)
        self._model.adapters.discard(adapter)


def _dtype(spec: ModelSpec, path: Path) -> torch.dtype:
    """The precision that the options ask for; `auto` is what config.json says, else float32."""
    from shoal.runtimes.torch.tensors import PRECISIONS

    chosen = spec.options.get("dtype", "float32")
    if chosen == "auto":
        config = read_config(path.parent)
        stored = config.get("dtype") or config.get("torch_dtype")
        chosen = stored if stored in PRECISIONS else "float32"
    if chosen not in PRECISIONS:
        raise ModelUnavailable(f"{spec.key}: option dtype is auto, {', '.join(PRECISIONS)}")
    return PRECISIONS[str(chosen)]
