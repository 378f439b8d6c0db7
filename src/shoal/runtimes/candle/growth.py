"""One text that an engine lets grow, from its first token to its end.

Owns what is told of it: pieces in order, stop texts, how many tokens and how long, and one end.
Does not own the engine (`generator`) or when an item starts and stops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from shoal.clock import monotonic
from shoal.errors import RunFailed, ShoalError
from shoal.ipc.messages import RunItem
from shoal.runtimes.interface import Emit
from shoal.runtimes.stops import StopText
from shoal.wire.generation import FinishReason, Generated, Generation, Piece, TokenLogprob

# What an engine makes of a character whose last bytes did not come.
_CUT = "\ufffd"


class Growth:
    """A text. Its methods may be called from any thread; what it emits is in order.

    prompt_tokens: to be set before it follows the engine.
    """

    def __init__(self, item: RunItem, emit: Emit) -> None:
        self.item = item
        self.asked = item.params.generation or Generation()
        self.ended = False
        self.prompt_tokens = 0
        self._emit = emit
        self._changing = threading.Lock()
        self._stops = StopText(self.asked.stop)
        self._begun_s = monotonic()
        self._first_s = self._last_s = 0.0
        self._tokens = 0
        self._parts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def follow(self, begin: Callable[[], tuple[Any, Iterator[Any]] | None]) -> bool:
        """Reads the engine's chunks to the end; whether the engine is still there.

        A chunk is a token, but tokens that are no text have none; the last one has their number.
        begin: hands the item to the engine; its first chunk, and the others, or None for a text
        that has ended. Leaving this frees the engine's sequence, for nothing else holds its chunks.
        """
        if self.ended:
            return True
        try:
            begun = begin()
            if begun is None:
                return True
            chunk, chunks = begun
            while self._take(chunk):
                chunk = next(chunks)
        except ShoalError as error:
            self.fail(error)
        except StopIteration:
            self.fail(RunFailed("the engine was lost"))
            return False
        return True

    def _take(self, chunk: Any) -> bool:
        """Grows by a chunk; whether more are wanted."""
        choice, usage = chunk.choices[0], chunk.usage
        with self._changing:
            if self.ended:
                return False
            self._last_s = monotonic()
            self._first_s = self._first_s or self._last_s
            tokens = 1 if usage is None else max(usage.completion_tokens - self._tokens, 1)
            self._tokens += tokens
            text = choice.delta.content or ""
            if not self._parts and choice.logprobs is not None:
                # The engine drops the space before the first word, and its token still has it.
                token = choice.logprobs.token
                text = token if token.lstrip() == text else text
            reason = choice.finish_reason
            if reason == "length":
                text = text.rstrip(_CUT)
            own_end = reason is not None and reason != "length" and not text
            wanted = self.asked.logprobs is not None and not own_end
            logprobs = [_logprob(choice.logprobs)] if wanted else []
            self._grow(self._stops.feed(text), tokens, logprobs)
            if self._stops.hit:
                self._end("stop")
            elif reason is not None:
                self._end("length" if "length" in reason else "stop")
            return not self.ended

    def _grow(self, text: str, tokens: int, logprobs: list[TokenLogprob]) -> None:
        self._parts.append(text)
        self._logprobs += logprobs
        if self.asked.stream:
            self._emit(Piece(text, tokens, logprobs))

    def cancel(self) -> None:
        """Ends it before it is whole."""
        with self._changing:
            if not self.ended:
                self._end("cancelled")

    def fail(self, error: ShoalError) -> None:
        """Ends it with an error, unless it has ended."""
        with self._changing:
            if not self.ended:
                self.ended = True
                self._emit(error)

    def _end(self, reason: FinishReason) -> None:
        rest = self._stops.rest()
        if rest:
            self._grow(rest, 0, [])
        self.ended = True
        further = self._tokens - 1
        self._emit(
            Generated(
                "".join(self._parts),
                reason,
                self.prompt_tokens,
                self._tokens,
                first_token_s=(self._first_s or monotonic()) - self._begun_s,
                token_s=(self._last_s - self._first_s) / further if further > 0 else 0.0,
                logprobs=self._logprobs,
            )
        )


def _logprob(found: Any) -> TokenLogprob:
    top = [(one.bytes or "", one.logprob) for one in found.top_logprobs]
    return TokenLogprob(found.token, found.logprob, top)
