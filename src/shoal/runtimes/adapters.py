"""A LoRA adapter's folder as PEFT writes it: what it says, and its pairs of matrices, checked.

A pair (Hu et al. 2021) adds `scale * x @ A.T @ B.T` to what a linear map of the base makes of x;
scale is alpha / rank, or alpha / sqrt(rank) (Kalajdzievski 2023). Owns reading the folder's two
files, the checks that need no base model, and which modules the config means (as PEFT matches
names). Does not own which map of a network a module is, or computing: a runtime does. What changes
more than linear maps is refused by its name, never passed over.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import ModelUnavailable
from shoal.ipc.messages import AdapterSpec
from shoal.runtimes.checkpoint import SafetensorsFile, Weights
from shoal.runtimes.patterns import Patterns, Refused

Floats = npt.NDArray[np.float32]

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

# Fields of the config that, if set, change more than a product of two matrices adds.
_BEYOND = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
_LAYERS = re.compile(r"[\w.]+")
_STORED = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to one linear map: a [rank, in], b [out, rank] with the scale multiplied in."""

    a: Floats
    b: Floats


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A parsed `adapter_config.json`; a field at fault raises `ModelUnavailable` that names it."""

    values: Mapping[str, Any]
    where: str
    patterns: Patterns = field(default_factory=Patterns, repr=False, compare=False)

    @classmethod
    def read(cls, folder: Path, where: str) -> AdapterConfig:
        """The config of a folder. Raises `ModelUnavailable` for what is no plain LoRA."""
        try:
            values = json.loads((folder / CONFIG).read_text("utf-8"))
        except FileNotFoundError as error:
            raise ModelUnavailable(f"{where}: the adapter has no {CONFIG}") from error
        except (ValueError, RecursionError) as error:
            raise ModelUnavailable(f"{where}: {CONFIG} is no JSON: {error}") from error
        if not isinstance(values, dict):
            raise ModelUnavailable(f"{where}: {CONFIG} is no JSON object")
        config = cls(values, where)
        config.check()
        return config

    def check(self) -> None:
        """Raises `ModelUnavailable` for what is no plain LoRA."""
        kind, bias = self.values.get("peft_type"), self.values.get("bias", "none")
        if kind != "LORA":
            raise self.refused(f"peft_type is {kind!r}; LORA is supported")
        for name in _BEYOND:
            if self.values.get(name):
                raise self.refused(f"{name} is not supported")
        if bias != "none":
            raise self.refused(f"bias {bias!r} is not supported, only 'none'")

    def refused(self, why: str) -> ModelUnavailable:
        """The error that says what of this config cannot be served."""
        return ModelUnavailable(f"{self.where}: {CONFIG}: {why}")

    def rank(self, module: str) -> int:
        """The rank of a module's pair."""
        rank = self._of("rank_pattern", module, self.values.get("r"))
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise self.refused(f"the rank of {module} is {rank!r}, no whole number from 1 on")
        return rank

    def scale(self, module: str) -> float:
        """What the product of a module's pair is multiplied by."""
        alpha = self._of("alpha_pattern", module, self.values.get("lora_alpha"))
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) < 1e30:
            raise self.refused(f"lora_alpha of {module} is no number")
        rank = self.rank(module)
        return float(alpha) / (math.sqrt(rank) if self.values.get("use_rslora") else rank)

    def _of(self, field: str, module: str, usual: Any) -> Any:
        """The value of the first pattern that ends the module's name, else the usual one."""
        patterns = self.values.get(field) or {}
        if not isinstance(patterns, dict):
            raise self.refused(f"{field} is no object")
        for pattern, value in patterns.items():
            if self._match(self.patterns.ending, pattern, module):
                return value
        return usual

    def targets(self, module: str) -> bool:
        """Whether the adapter should have a pair for a linear map of this name."""
        if self._named("exclude_modules", module):
            return False
        target = self.values.get("target_modules")
        if isinstance(target, str) and target.lower() == "all-linear":
            return True
        if not self._named("target_modules", module):
            return False
        exact = isinstance(target, str) or module in (target or ())
        return exact or self._in_layers(module)

    def _named(self, field: str, module: str) -> bool:
        """A text is a pattern of whole names; a list has names, or what names end in."""
        named = self.values.get(field) or []
        if isinstance(named, str):
            return self._match(self.patterns.whole, named, module)
        if not isinstance(named, list):
            raise self.refused(f"{field} is neither a text nor a list")
        self._spend(len(named))
        return any(module == name or module.endswith(f".{name}") for name in named)

    def _in_layers(self, module: str) -> bool:
        """Whether `layers_to_transform` has the number of the module's layer."""
        chosen = self.values.get("layers_to_transform")
        if chosen is None or chosen == []:
            return True
        named = self.values.get("layers_pattern") or []
        names = named if isinstance(named, list) else [named]
        for name in names:
            if not isinstance(name, str) or not _LAYERS.fullmatch(name):
                raise self.refused(f"layers_pattern {name!r} is not the name of a list of layers")
        self._spend(1 + len(names) * len(module) // 16)
        number = r"\.(?P<layer>\d{1,9})\."
        forms = [rf"(?:^|.*?\.){re.escape(name)}{number}" for name in names]
        # Without a name, the first number that is not at the very beginning.
        for form in forms or [rf".*?\.[^.]*{number}"]:
            found = re.match(form, module)
            if found:
                return int(found["layer"]) in (chosen if isinstance(chosen, list) else [chosen])
        return False

    def _match(self, how: Callable[[str, str], bool], pattern: str, module: str) -> bool:
        try:
            return how(pattern, module)
        except Refused as error:
            raise self.refused(str(error)) from error

    def _spend(self, steps: int) -> None:
        try:
            self.patterns.spend(steps)
        except Refused as error:
            raise self.refused(str(error)) from error


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter as its folder has it; pairs by the name that PEFT gives the adapted module."""

    config: AdapterConfig
    pairs: Mapping[str, LowRank]

    @property
    def nbytes(self) -> int:
        """Bytes of its matrices."""
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.pairs.values())


def read_adapter(spec: AdapterSpec) -> AdapterFile:
    """The adapter of a folder, in memory of its own: the file may be replaced while it serves.

    Raises `ModelUnavailable` for one that is not whole or holds more than pairs of linear maps.
    """
    folder = Path(spec.path)
    config = AdapterConfig.read(folder, spec.key)
    if not (folder / WEIGHTS).is_file():
        raise ModelUnavailable(f"{spec.key}: the adapter has no {WEIGHTS}")
    file = SafetensorsFile(folder / WEIGHTS)
    halves: dict[str, dict[str, Weights]] = {}
    for name in file:
        found = _STORED.fullmatch(name)
        if found is None:
            raise ModelUnavailable(f"{spec.key}: {name} is no half of a pair for a linear map")
        halves.setdefault(found[1], {})[found[2]] = file[name]
    if not halves:
        raise ModelUnavailable(f"{spec.key}: {WEIGHTS} is empty")
    return AdapterFile(config, {name: _pair(config, name, both) for name, both in halves.items()})


def _pair(config: AdapterConfig, module: str, halves: Mapping[str, Weights]) -> LowRank:
    at = f"{config.where}: {module}"
    for half in "AB":
        if half not in halves:
            raise ModelUnavailable(f"{at} is half a pair: it has no lora_{half}")
    for half, values in halves.items():
        if values.ndim != 2 or values.dtype.kind != "f":
            raise ModelUnavailable(f"{at}.lora_{half} is no matrix of floating-point numbers")
    a, b = halves["A"], halves["B"]
    rank = config.rank(module)
    if a.shape[0] != rank or b.shape[1] != rank:
        raise ModelUnavailable(
            f"{at}: lora_A is {a.shape}, lora_B is {b.shape}, and {CONFIG} says rank {rank}"
        )
    with np.errstate(over="ignore"):
        scaled = (b.astype(np.float64) * config.scale(module)).astype(np.float32)
        pair = LowRank(np.array(a, np.float32), scaled)
    for half, values in zip("AB", (pair.a, pair.b), strict=True):
        if not np.isfinite(values).all():
            raise ModelUnavailable(f"{at}.lora_{half} holds numbers that are not finite")
    return pair
