"""How the runtime `null` generates: words that depend on the prompt, the adapter and the seed.

Owns one thread that lets every text of the process grow by a word a step, as an engine with
continuous batching does. Does not own what else the runtime answers (`null`).
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from dataclasses import dataclass, field
from itertools import count

from shoal.clock import monotonic
from shoal.errors import InputTooLong, InvalidRequest, RunFailed
from shoal.ipc.messages import ModelSpec, RunItem
from shoal.runtimes.interface import Capacity, Emit
from shoal.runtimes.stops import StopText
from shoal.wire.generation import FinishReason, Generated, Generation, Piece, TokenLogprob

SLOTS = 4
WORDS = 16
CRASH_AT = 3
_LOGPROB = -0.5


def prompt_of(item: RunItem) -> str:
    """The prompt as one text."""
    return "\n".join(f"{turn.role}: {turn.content}" for turn in item.chat) or item.texts[0]


def word(prompt: str, at: int, seed: int | None, adapter: str = "") -> str:
    """The word at a place: the same for the same prompt, adapter and seed, everywhere."""
    return f"w{zlib.crc32(f'{prompt}|{adapter}|{seed or 0}|{at}'.encode()) % 10_000} "


@dataclass(slots=True)
class _Text:
    """A text that grows. crashes: it takes the process down after a few words."""

    item: RunItem
    emit: Emit
    asked: Generation
    most: int
    prompt: str
    prompt_tokens: int
    crashes: bool
    begun_s: float
    first_s: float = 0.0
    tokens: int = 0
    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stops: StopText = field(default_factory=lambda: StopText(()))

    def step(self) -> bool:
        """Grows by a word; whether that was the last."""
        new = word(self.prompt, self.tokens, self.asked.seed, self.item.adapter)
        sure = self.stops.feed(new)
        self.tokens += 1
        self.first_s = self.first_s or monotonic()
        if self.crashes and self.tokens == CRASH_AT:
            os._exit(66)
        logprobs = []
        if self.asked.logprobs is not None:
            top = [(new, _LOGPROB)] * min(1, self.asked.logprobs)
            logprobs = [TokenLogprob(new, _LOGPROB, top)]
        self.grow(sure, logprobs)
        return self.stops.hit or self.tokens >= self.most

    def grow(self, sure: str, logprobs: list[TokenLogprob]) -> None:
        """Adds to the text, and sends it where pieces are wanted."""
        self.parts.append(sure)
        self.logprobs += logprobs
        if self.asked.stream:
            self.emit(Piece(sure, 1, logprobs))

    def end(self, reason: FinishReason) -> None:
        """Says that it is whole."""
        rest = self.stops.rest()
        if rest and self.asked.stream:
            self.emit(Piece(rest))
        now_s = monotonic()
        further = self.tokens - 1
        self.emit(
            Generated(
                "".join(self.parts) + rest,
                reason,
                self.prompt_tokens,
                self.tokens,
                first_token_s=(self.first_s or now_s) - self.begun_s,
                token_s=(now_s - self.first_s) / further if further > 0 else 0.0,
                logprobs=self.logprobs,
            )
        )


class NullTexts:
    """The texts of one process. Options of the model: slots, tokens, token_s, kv_tokens."""

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}
        self._token_s = 0.0
        self._numbers = count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @staticmethod
    def capacity(spec: ModelSpec) -> Capacity:
        """As the options say."""
        options = spec.options
        return Capacity(int(options.get("slots", SLOTS)), int(options.get("kv_tokens", 0)))

    def start(self, spec: ModelSpec, item: RunItem, emit: Emit) -> None:
        """Begins a text. Raises `InputTooLong`, `InvalidRequest` or `RunFailed`."""
        asked = item.params.generation or Generation()
        prompt = prompt_of(item)
        words = prompt.split()
        room = spec.max_tokens - len(words)
        if room < 1:
            raise InputTooLong(
                f"the prompt has {len(words)} tokens, and {spec.key} has a context of "
                f"{spec.max_tokens}"
            )
        if asked.schema is not None:
            raise InvalidRequest(f"{spec.key} cannot keep to a schema", param="schema")
        if spec.options.get("poison") == prompt:
            raise RunFailed(f"{spec.key}: the prompt is poison")
        wanted = min(asked.max_tokens or room, room)
        text = _Text(
            *(item, emit, asked, min(wanted, int(spec.options.get("tokens", WORDS)))),
            prompt=prompt,
            prompt_tokens=len(words),
            crashes=spec.options.get("crash") == prompt,
            begun_s=monotonic(),
            stops=StopText(asked.stop),
        )
        with self._changed:
            self._token_s = float(spec.options.get("token_s", 0.0))
            self._texts[next(self._numbers)] = text
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="texts", daemon=True)
                self._thread.start()

    def stop(self, item: str) -> None:
        """Ends an item's text."""
        with self._changed:
            found = [n for n, text in self._texts.items() if text.item.item == item]
            ended = [self._texts.pop(n) for n in found]
        for text in ended:
            text.end("cancelled")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._texts)
                for number, text in list(self._texts.items()):
                    if text.step():
                        del self._texts[number]
                        reached = not text.stops.hit and text.asked.max_tokens == text.tokens
                        text.end("length" if reached else "stop")
            time.sleep(self._token_s)
