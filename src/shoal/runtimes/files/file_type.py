"""What kind of file it is, by the graph of Magika (Fratantonio et al. 2024) over its ends.

`config.min.json` beside the graph says how many bytes, and which classes there are. Two of them
stand for another: what looks random is `unknown`, or plain text. A file with hardly a byte in it is
not shown to the graph: it is text where it is UTF-8. Owns all this. Does not own the batch
(`classes`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import InvalidRequest, ModelUnavailable
from shoal.ipc.messages import ModelSpec, RunItem
from shoal.runtimes.checkpoint import locate
from shoal.runtimes.files.classes import Judged, classify
from shoal.runtimes.holding import Outcomes
from shoal.runtimes.onnx.session import Session

Ints = npt.NDArray[np.int32]

_TEXT, _UNKNOWN = "txt", "unknown"


class FileType:
    """The graph and its configuration."""

    def __init__(self, spec: ModelSpec, *, device: str, threads: int) -> None:
        path = locate(spec, ("model.onnx",))
        config = _config(path.parent / "config.min.json", spec.key)
        self._session = Session(path, {}, device=device, threads=threads, where=spec.key)
        self.memory_bytes = path.stat().st_size
        self._begin, self._end = int(config["beg_size"]), int(config["end_size"])
        self._read = int(config["block_size"])
        self._padding = int(config["padding_token"])
        self._least_bytes = int(config["min_file_size_for_dl"])
        stands_for: dict[str, str] = config["overwrite_map"]
        names = [stands_for.get(name, name) for name in config["target_labels_space"]]
        self._labels = list(dict.fromkeys([*names, _TEXT, _UNKNOWN]))
        # One column of probabilities for each class, added up in the column of what it stands for.
        self._sums = np.zeros((len(names), len(self._labels)), np.float32)
        self._sums[range(len(names)), [self._labels.index(name) for name in names]] = 1

    def run(self, items: Sequence[RunItem]) -> Outcomes:
        """Scores of all kinds for every file."""
        return classify(items, self._labels, self._ends, self._judge)

    def _ends(self, blob: bytes) -> Ints:
        """The file's first and last bytes without outer white space, int32 [begin + end]."""
        if not blob:
            raise InvalidRequest("the file is empty: zero bytes")
        first, last = blob[: self._read].lstrip(), blob[-self._read :].rstrip()
        row = np.full(self._begin + self._end, self._padding, np.int32)
        begin, end = first[: self._begin], last[-self._end :]
        if len(begin) < self._least_bytes:
            # No graph needed; the row says which of the two it is.
            row[:] = -1 if _is_text(blob) else -2
            return row
        row[: len(begin)] = np.frombuffer(begin, np.uint8)
        row[len(row) - len(end) :] = np.frombuffer(end, np.uint8)
        return row

    def _judge(self, rows: Ints) -> Judged:
        feeds = {self._session.inputs[0].name: np.maximum(rows, 0)}
        found = self._session.run(self._session.outputs[0].name, feeds) @ self._sums
        for mark, label in ((-1, _TEXT), (-2, _UNKNOWN)):
            found[rows[:, 0] == mark] = np.eye(1, len(self._labels), self._labels.index(label))
        return {"scores": np.asarray(found, np.float32)}


def _is_text(blob: bytes) -> bool:
    try:
        blob.decode()
    except UnicodeDecodeError:
        return False
    return True


def _config(path: Path, key: str) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads(path.read_bytes())
        if config["mid_size"] or config["use_inputs_at_offsets"]:
            raise ModelUnavailable(f"{key}: a graph over other bytes than the ends is not known")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelUnavailable(f"{key}: {path} cannot be used: {error}") from error
    return config
