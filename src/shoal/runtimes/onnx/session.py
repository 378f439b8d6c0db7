"""ONNX Runtime sessions: how they are set up, and what their errors mean.

Owns the session options, leaving a session so that the next one is quick, and the mapping of
foreign exceptions. Does not own graphs or batches.
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
from shoal.runtimes.onnx.prepared import DATA, GRAPH, find, forget, make

Array = npt.NDArray[Any]

# The binding has one exception for each status and no base of its own.
_ERRORS: tuple[type[Exception], ...] = tuple(
    kind for kind in vars(native).values() if isinstance(kind, type) and issubclass(kind, Exception)
)
_ALL_ERRORS: tuple[type[Exception], ...] = (*_ERRORS, MemoryError, RuntimeError)
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
    """One loaded graph.

    prepared: where ONNX Runtime's work on the graph is kept (`onnx.prepared`), for sessions that
    may be left and come back; on the CPU only. warm: the graph was found there.
    """

    def __init__(
        self,
        model: bytes | Path,
        weights: Mapping[str, Array],
        *,
        device: str,
        threads: int,
        where: str,
        prepared: Path | None = None,
    ) -> None:
        self._where = where
        self._source = str(model) if isinstance(model, Path) else model
        self._weights = dict(weights)
        self._device = device
        self._threads = threads
        self._prepared = prepared if device == "cpu" else None
        self.weights_bytes = sum(array.nbytes for array in weights.values())
        self.warm = False
        session = self._open_prepared()
        try:
            self._session = session or self._open(self._source, self._options(self._weights))
        except _ERRORS as error:
            if _lacks_memory(error):
                raise OutOfMemory(f"{where}: no memory to load the graph") from error
            raise ModelUnavailable(f"{where}: the graph does not load: {error}") from error

    def leave(self, *, keep: bool) -> None:
        """Ends the session, which cannot run any more; with `keep`, the next one is warm."""
        del self._session
        if self._prepared is None:
            return
        if not keep:
            forget(self._prepared)
        elif not self.warm:
            make(self._prepared, self._write)

    def _open(self, source: str | bytes, options: ort.SessionOptions) -> ort.InferenceSession:
        return ort.InferenceSession(source, options, providers=providers(self._device))

    def _open_prepared(self) -> ort.InferenceSession | None:
        path = find(self._prepared) if self._prepared else None
        if self._prepared is None or path is None:
            return None
        options = self._options({})
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            session = self._open(str(path), options)
        except _ERRORS:
            forget(self._prepared)  # it is damaged, and made anew when this session is left
            return None
        self.warm = True
        return session

    def _write(self, folder: Path) -> None:
        """Has the graph optimised and its matrices packed once more, into files."""
        try:
            options = self._options(self._weights)
            options.optimized_model_filepath = str(folder / GRAPH)
            for name, value in (
                ("session.optimized_model_external_initializers_file_name", DATA),
                ("session.optimized_model_external_initializers_min_size_in_bytes", "1024"),
                ("session.save_external_prepacked_constant_initializers", "1"),
            ):
                options.add_session_config_entry(name, value)
            self._open(self._source, options)
        except _ALL_ERRORS as error:
            raise OSError(f"{self._where} cannot be prepared: {error}") from error

    def _options(self, weights: Mapping[str, Array]) -> ort.SessionOptions:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.log_severity_level = _ONLY_ERRORS
        # Shapes differ from batch to batch; a memory plan per shape would pile up.
        options.enable_mem_pattern = False
        # Idle threads sleep instead of burning the core that another process needs.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        values = [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        options.add_external_initializers(list(weights), values)
        return options

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
