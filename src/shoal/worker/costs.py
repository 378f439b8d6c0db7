"""What this worker has learnt of its models' costs, kept across restarts.

Owns one cost model per (model, runtime, kind of device, threads), and the useful-token rates that
heartbeats report. Does not own the arithmetic (`shoal.core.cost`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.catalog.schema import Entry
from shoal.core.cost import CostModel, CostState, Work
from shoal.core.types import Batch
from shoal.worker.book import read_book, write_book

MAX_KEPT = 1_000
_SMOOTHING = 0.05
# A text is hundreds of steps of its engine: each says more than a batch.
_SMOOTHING_TEXTS = 0.2
_FULL_BATCH_S = 0.1
_TYPICAL_TOKENS = 64
_MANY_TOKENS = 2_048
_ENOUGH_BATCHES = 8


@dataclass(slots=True)
class Rates:
    """Moving averages of one model's batches and texts; rates are 0 while unknown.

    The averages are divided, not the ratios averaged: a batch of two tokens that takes as long as
    one of two thousand must not pass for the price of a token.
    """

    batch_s: float = 0.0
    batch_tokens: float = 0.0
    batch_items: float = 0.0
    padded_tokens: float = 0.0
    text_bytes: float = 0.0
    text_tokens: float = 0.0

    @property
    def token_s(self) -> float:
        """Device seconds of a useful token."""
        return self.batch_s / self.batch_tokens if self.batch_tokens else 0.0

    @property
    def item_s(self) -> float:
        """Device seconds of an item."""
        return self.batch_s / self.batch_items if self.batch_items else 0.0

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text of a token."""
        return self.text_bytes / self.text_tokens if self.text_tokens else 0.0


class CostBook:
    """All cost models of a worker. `hardware` names what they were measured on."""

    def __init__(self, file: Path, hardware: str) -> None:
        self._file = file
        self._hardware = hardware
        self._kept = read_book(file, CostState)
        self._models: dict[str, CostModel] = {}
        self._rates: dict[str, Rates] = {}

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
        return self._rates.setdefault(self._key(entry), Rates())

    def known_token_s(self, entry: Entry) -> float:
        """Device seconds of a padded token in a full batch; 0 where too little was measured."""
        key = self._key(entry)
        state = self._models[key].state() if key in self._models else self._kept.get(key)
        if state is None or state.batches < _ENOUGH_BATCHES:
            return 0.0
        full = Work(_MANY_TOKENS, _MANY_TOKENS * _TYPICAL_TOKENS)
        return CostModel(state).predict_s(full) / _MANY_TOKENS

    def token_s(self, entry: Entry) -> float:
        """Device seconds of a useful token while there is plenty to do; 0 while none has run.

        What was seen, or what a full batch should take where that is less: with little to do,
        batches are small and the price of a token in them says nothing of a backlog's.
        """
        rates = self.rates(entry)
        if not rates.batch_tokens or entry.generates:
            return rates.token_s
        model = self.model(entry)
        most = min(
            entry.profile.max_batch_tokens, model.budget_tokens(_FULL_BATCH_S, _TYPICAL_TOKENS)
        )
        if most < rates.batch_tokens:
            return rates.token_s
        full_s = model.predict_s(Work(most, most * _TYPICAL_TOKENS))
        return min(rates.token_s, full_s / most * rates.padded_tokens / rates.batch_tokens)

    def full_s(self, entry: Entry) -> float:
        """Device seconds of a batch at nearly the best rate; 0 where too little was measured."""
        model = self._models.get(self._key(entry))
        return 0.0 if model is None else model.full_s()

    def on_batch(self, entry: Entry, batch: Batch, took_s: float) -> None:
        """A batch ran: what a useful token of it took."""
        if batch.tokens:
            rates = self.rates(entry)
            rates.batch_s = _mix(rates.batch_s, took_s)
            rates.batch_items = _mix(rates.batch_items, len(batch.items))
            rates.batch_tokens = _mix(rates.batch_tokens, batch.tokens)
            rates.padded_tokens = _mix(rates.padded_tokens, batch.work.padded_tokens)

    def on_text_grown(self, entry: Entry, tokens: int, took_s: float, at_once: int) -> None:
        """A text is whole: so long it took for its tokens, its prompt's included.

        at_once: how many grow when there are plenty. That share of the time is the price of a
        backlog's tokens, also where this text grew alone: the steps of an engine with free slots
        are hardly shorter.
        """
        rates = self.rates(entry)
        rates.batch_s = _mix(rates.batch_s, took_s / at_once, _SMOOTHING_TEXTS)
        rates.batch_items = _mix(rates.batch_items, 1)
        rates.batch_tokens = _mix(rates.batch_tokens, tokens, _SMOOTHING_TEXTS)

    def on_text(self, entry: Entry, text_bytes: int, tokens: int) -> None:
        """Texts were tokenised."""
        if tokens:
            rates = self.rates(entry)
            rates.text_bytes = _mix(rates.text_bytes, text_bytes)
            rates.text_tokens = _mix(rates.text_tokens, tokens)

    def save(self) -> None:
        """Writes the file; what another process has written there meanwhile stays."""
        self._kept |= read_book(self._file, CostState)
        for key, model in self._models.items():
            self._kept.pop(key, None)  # what is in use goes to the end: the oldest is the first
            self._kept[key] = model.state()
        write_book(self._file, self._kept, MAX_KEPT)


def _mix(old: float, new: float, smoothing: float = _SMOOTHING) -> float:
    return new if old == 0.0 else old + smoothing * (new - old)
