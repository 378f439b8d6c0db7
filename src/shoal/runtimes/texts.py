"""A text that an engine lets grow, up to its one end.

Owns what is told of it: pieces in order, nothing of a stop text, how many tokens it took and how
long. Does not own the engine, or when an item starts and stops.
"""

from __future__ import annotations

from shoal.clock import monotonic
from shoal.errors import ShoalError
from shoal.runtimes.interface import Emit
from shoal.runtimes.stops import StopText
from shoal.wire.generation import FinishReason, Generated, Generation, Piece, TokenLogprob

# What engines make of a character whose last bytes did not come.
_CUT = "\ufffd"


class GrowingText:
    """One text. Where several threads have it, whoever calls holds a lock.

    Attributes:
        asked: how it is to be continued.
        prompt_tokens: to be known before its end.
        tokens: that it took so far.
        ended: its end was told: nothing more will be.
    """

    def __init__(self, asked: Generation | None, emit: Emit, prompt_tokens: int = 0) -> None:
        self.asked = asked or Generation()
        self.prompt_tokens = prompt_tokens
        self.tokens = 0
        self.ended = False
        self._emit = emit
        self._stops = StopText(self.asked.stop)
        self._begun_s = monotonic()
        self._first_s = self._last_s = 0.0
        self._parts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop text was found: what comes then is no part of it."""
        return self._stops.hit

    def grow(
        self, text: str, tokens: int, logprobs: list[TokenLogprob], *, at_length: bool = False
    ) -> None:
        """Grows by what so many tokens gave; what is certain of it is sent.

        at_length: the bound on its length ended it here, perhaps within a character.
        """
        self._last_s = monotonic()
        self._first_s = self._first_s or self._last_s
        self.tokens += tokens
        self._send(self._stops.feed(text.rstrip(_CUT) if at_length else text), tokens, logprobs)

    def end(self, reason: FinishReason) -> None:
        """Tells that it is whole, unless it has ended."""
        if self.ended:
            return
        self.ended = True
        rest = self._stops.rest()
        if rest:
            self._send(rest, 0, [])
        further = self.tokens - 1
        self._emit(
            Generated(
                "".join(self._parts),
                reason,
                self.prompt_tokens,
                self.tokens,
                first_token_s=(self._first_s or monotonic()) - self._begun_s,
                token_s=(self._last_s - self._first_s) / further if further > 0 else 0.0,
                logprobs=self._logprobs,
            )
        )

    def fail(self, error: ShoalError) -> None:
        """Ends it by an error, unless it has ended."""
        if not self.ended:
            self.ended = True
            self._emit(error)

    def _send(self, text: str, tokens: int, logprobs: list[TokenLogprob]) -> None:
        self._parts.append(text)
        self._logprobs += logprobs
        if self.asked.stream and (text or tokens or logprobs):
            self._emit(Piece(text, tokens, logprobs))
