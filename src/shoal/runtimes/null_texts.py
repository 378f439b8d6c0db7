"""How the runtime `null` generates: words that depend on the prompt, the adapter and the seed.

Owns one thread that lets every text of the process grow by a word a step, as an engine with
continuous batching does. Does not own what else the runtime answers (`null`).
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from itertools import count

from shoal.errors import InputTooLong, InvalidRequest, RunFailed
from shoal.ipc.messages import ModelSpec, RunItem
from shoal.runtimes.interface import Capacity, Emit
from shoal.runtimes.texts import GrowingText
from shoal.wire.generation import Generation, TokenLogprob

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


class _Text(GrowingText):
    """A text that grows. crashes: it takes the process down after a few words."""

    def __init__(self, item: RunItem, emit: Emit, prompt: str, *, most: int, crashes: bool) -> None:
        super().__init__(item.params.generation, emit, len(prompt.split()))
        self.item = item
        self._prompt = prompt
        self._most = most
        self._crashes = crashes

    def step(self) -> bool:
        """Grows by a word; whether that was the last."""
        new = word(self._prompt, self.tokens, self.asked.seed, self.item.adapter)
        if self._crashes and self.tokens + 1 == CRASH_AT:
            os._exit(66)
        logprobs = []
        if self.asked.logprobs is not None:
            top = [(new, _LOGPROB)] * min(1, self.asked.logprobs)
            logprobs = [TokenLogprob(new, _LOGPROB, top)]
        self.grow(new, 1, logprobs)
        return self.stopped or self.tokens >= self._most


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
            *(item, emit, prompt),
            most=min(wanted, int(spec.options.get("tokens", WORDS))),
            crashes=spec.options.get("crash") == prompt,
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
                        reached = not text.stopped and text.asked.max_tokens == text.tokens
                        text.end("length" if reached else "stop")
            time.sleep(self._token_s)
