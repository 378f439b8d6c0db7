"""What this worker has learnt of its models' costs, kept across restarts.

Owns one cost model per (model, runtime, kind of device, threads), the useful-token rates that
heartbeats report, and the file that keeps the cost models. A file that cannot be read is an
estimate less, never an error. Does not own the arithmetic (`shoal.core.cost`).
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.catalog.schema import Entry
from shoal.core.cost import CostModel, CostState
from shoal.core.types import Batch

log = logging.getLogger(__name__)

_SMOOTHING = 0.05


@dataclass(slots=True)
class Rates:
    """Moving averages of one model; 0 while unknown."""

    token_s: float = 0.0
    bytes_per_token: float = 0.0


class CostBook:
    """All cost models of a worker. `hardware` names what they were measured on."""

    def __init__(self, file: Path, hardware: str) -> None:
        self._file = file
        self._hardware = hardware
        self._kept = self._read()
        self._models: dict[str, CostModel] = {}
        self._rates: dict[str, Rates] = {}

    def _read(self) -> dict[str, CostState]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, CostState])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s is not readable, costs are learnt anew: %s", self._file, error)
            return {}

    def _key(self, entry: Entry) -> str:
        return f"{entry.key} {entry.runtime} {self._hardware}"

    def model(self, entry: Entry) -> CostModel:
        """The cost model of an entry; from the file, else from its profile."""
        key = self._key(entry)
        if key not in self._models:
            guess = CostState(entry.profile.launch_ms / 1e3, 1.0 / entry.profile.tokens_per_s)
            self._models[key] = CostModel(self._kept.get(key, guess))
        return self._models[key]

    def rates(self, entry: Entry) -> Rates:
        """The averages of an entry."""
        return self._rates.setdefault(entry.id, Rates())

    def on_batch(self, entry: Entry, batch: Batch, took_s: float) -> None:
        """A batch ran: what a useful token of it took."""
        if batch.tokens:
            rates = self.rates(entry)
            rates.token_s = _mix(rates.token_s, took_s / batch.tokens)

    def on_text(self, entry: Entry, text_bytes: int, tokens: int) -> None:
        """Texts were tokenised."""
        if tokens:
            rates = self.rates(entry)
            rates.bytes_per_token = _mix(rates.bytes_per_token, text_bytes / tokens)

    def save(self) -> None:
        """Writes the file in one piece."""
        self._kept |= {key: model.state() for key, model in self._models.items()}
        part = self._file.with_suffix(f".{os.getpid()}.part")
        try:
            part.write_bytes(msgspec.json.format(msgspec.json.encode(self._kept), indent=1))
            part.replace(self._file)
        except OSError as error:
            log.warning("costs cannot be kept: %s", error)


def _mix(old: float, new: float) -> float:
    return new if old == 0.0 else old + _SMOOTHING * (new - old)
