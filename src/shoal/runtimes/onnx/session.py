"""ONNX Runtime sessions: how they are set up, and what their errors mean.

Owns the session options and the mapping of foreign exceptions. Does not own graphs or batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as native

from shoal.errors import ModelUnavailable, OutOfMemory, RunFailed, RuntimeUnavailable

Array = npt.NDArray[Any]

# The binding has one exception for each status and no base of its own.
_ERRORS: tuple[type[Exception], ...] = tuple(
    kind for kind in vars(native).values() if isinstance(kind, type) and issubclass(kind, Exception)
)
_NO_MEMORY = ("bad alloc", "bad_alloc", "failed to allocate", "out of memory")
_ONLY_ERRORS = 3


def providers(device: str) -> list[Any]:
    """The execution providers for a device. Raises `RuntimeUnavailable` when it has none here."""
    if device == "cpu":
        return ["CPUExecutionProvider"]
    kind, _, index = device.partition(":")
    if kind != "cuda" or "CUDAExecutionProvider" not in ort.get_available_providers():
        raise RuntimeUnavailable(
            f"this build of onnxruntime cannot use {device}; for CUDA install onnxruntime-gpu"
        )
    return [("CUDAExecutionProvider", {"device_id": int(index or 0)}), "CPUExecutionProvider"]


class Session:
    """One loaded graph."""

    def __init__(
        self,
        model: bytes | Path,
        weights: Mapping[str, Array],
        *,
        device: str,
        threads: int,
        where: str,
    ) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = _ONLY_ERRORS
        # Shapes differ from batch to batch; a memory plan per shape would pile up.
        options.enable_mem_pattern = False
        # Idle threads sleep instead of burning the core that another process needs.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._where = where
        self._kept = [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        options.add_external_initializers(list(weights), self._kept)
        source = str(model) if isinstance(model, Path) else model
        try:
            self._session = ort.InferenceSession(source, options, providers=providers(device))
        except _ERRORS as error:
            if _lacks_memory(error):
                raise OutOfMemory(f"{where}: no memory to load the graph") from error
            raise ModelUnavailable(f"{where}: the graph does not load: {error}") from error
        self.weights_bytes = sum(array.nbytes for array in weights.values())

    @property
    def inputs(self) -> Sequence[Any]:
        """Inputs of the graph, each with name, type and shape."""
        return list(self._session.get_inputs())

    @property
    def outputs(self) -> Sequence[Any]:
        """Outputs of the graph, each with name, type and shape."""
        return list(self._session.get_outputs())

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the graph's makers wrote beside it."""
        written: dict[str, str] = self._session.get_modelmeta().custom_metadata_map
        return written

    def run(self, output: str, feeds: Mapping[str, Array]) -> npt.NDArray[np.float32]:
        """One output of the graph, as float32. Raises `OutOfMemory` or `RunFailed`."""
        (array,) = self.run_all(feeds, [output])
        return array

    def run_all(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None
    ) -> list[npt.NDArray[np.float32]]:
        """Outputs of the graph, all of them in its order or those named, as `run` gives one."""
        try:
            arrays = self._session.run(outputs, dict(feeds))
        except _ERRORS as error:
            if _lacks_memory(error):
                raise OutOfMemory(f"{self._where}: no memory for this batch") from error
            raise RunFailed(f"{self._where}: {error}") from error
        return [np.asarray(array, np.float32) for array in arrays]


def _lacks_memory(error: Exception) -> bool:
    text = str(error).lower()
    return any(sign in text for sign in _NO_MEMORY)
