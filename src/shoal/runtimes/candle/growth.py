"""One text that an engine lets grow, from its first token to its end.

Owns reading the engine's chunks. Does not own what is told of the text (`shoal.runtimes.texts`),
the engine (`generator`), or when an item starts and stops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from shoal.errors import RunFailed, ShoalError
from shoal.ipc.messages import RunItem
from shoal.runtimes.interface import Emit
from shoal.runtimes.texts import GrowingText
from shoal.wire.generation import TokenLogprob


class Growth(GrowingText):
    """A text. Its methods may be called from any thread; what it emits is in order.

    prompt_tokens: to be set before it follows the engine.
    """

    def __init__(self, item: RunItem, emit: Emit) -> None:
        super().__init__(item.params.generation, emit)
        self.item = item
        self._changing = threading.Lock()

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
            tokens = 1 if usage is None else max(usage.completion_tokens - self.tokens, 1)
            text = choice.delta.content or ""
            if not self.tokens and choice.logprobs is not None:
                # The engine drops the space before the first word, and its token still has it.
                token = choice.logprobs.token
                text = token if token.lstrip() == text else text
            reason = choice.finish_reason
            at_length = reason == "length"
            own_end = reason is not None and not at_length and not text
            wanted = self.asked.logprobs is not None and not own_end
            logprobs = [_logprob(choice.logprobs)] if wanted else []
            self.grow(text, tokens, logprobs, at_length=at_length)
            if self.stopped:
                self.end("stop")
            elif reason is not None:
                self.end("length" if "length" in reason else "stop")
            return not self.ended

    def cancel(self) -> None:
        """Ends it before it is whole."""
        with self._changing:
            self.end("cancelled")

    def fail(self, error: ShoalError) -> None:
        """Ends it by an error, unless it has ended."""
        with self._changing:
            super().fail(error)


def _logprob(found: Any) -> TokenLogprob:
    top = [(one.bytes or "", one.logprob) for one in found.top_logprobs]
    return TokenLogprob(found.token, found.logprob, top)
