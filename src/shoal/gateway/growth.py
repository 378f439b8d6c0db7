"""The texts of a streamed job, as their pieces come in and are taken by a reader.

Owns the order of pieces, mending a text of which a piece was lost, noticing one that began anew,
and keeping together what its reader has not taken yet: a slow reader gets fewer and larger pieces,
and what is held is never more than the texts themselves. Does not own the queue (`submit`) or how
anything is told to a client (`stream`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec

from shoal.errors import Bug, RuntimeCrashed
from shoal.gateway.jobs import End, Grew, Grown
from shoal.wire.envelope import Outcome, Result, Timing
from shoal.wire.generation import Generated, Piece, TokenLogprob, unpack


def whole(record: msgspec.Raw) -> Generated:
    """A continuation that somebody waits for. Raises `RuntimeCrashed` where it was cut short."""
    generated = unpack(record)
    if generated.finish_reason == "cancelled":
        raise RuntimeCrashed("the text was stopped before its end")
    return generated


@dataclass(slots=True)
class _Text:
    """One text. told: its parts so far; fresh: those of them that were not taken yet.

    worker: whose pieces they are. next_at: the number of the next piece. gap: a piece is missing,
    so that only the whole text can go on.
    """

    worker: str = ""
    timing: Timing = field(default_factory=Timing)
    next_at: int = 0
    gap: bool = False
    told: list[str] = field(default_factory=list)
    tokens: int = 0
    n_logprobs: int = 0
    fresh: list[str] = field(default_factory=list)
    fresh_tokens: int = 0
    fresh_logprobs: list[TokenLogprob] = field(default_factory=list)
    end: End | None = None

    def grow(self, piece: Piece) -> None:
        """Adds what is next."""
        self.told.append(piece.text)
        self.tokens += piece.tokens
        self.n_logprobs += len(piece.logprobs)
        self.fresh.append(piece.text)
        self.fresh_tokens += piece.tokens
        self.fresh_logprobs += piece.logprobs

    @property
    def shown(self) -> bool:
        """Whether a client may have seen anything of it."""
        return self.n_logprobs > 0 or any(self.told)

    def take(self) -> Grew | None:
        """All that was not taken yet, as one piece."""
        if not self.fresh:
            return None
        piece = Piece("".join(self.fresh), self.fresh_tokens, self.fresh_logprobs)
        self.fresh, self.fresh_tokens, self.fresh_logprobs = [], 0, []
        return Grew(piece, self.timing)


class Growth:
    """The texts of one job, by the index of their inputs. `changed` is set when there is news."""

    def __init__(self, of: int) -> None:
        self._texts = [_Text() for _ in range(of)]
        # In the order in which they came; each once.
        self._news: dict[int, None] = {}
        self.changed = asyncio.Event()

    @property
    def news(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._news)

    def piece(self, index: int, outcome: Outcome, piece: Piece) -> None:
        """Takes in a piece, the outcome's. Raises `RuntimeCrashed` where it began anew.

        An item that comes to another worker, or a second time to the same, is generated from its
        beginning: where nothing of it was told before, nobody needs to know.
        """
        text, at, worker = self._texts[index], outcome.at, outcome.worker
        if text.worker and (at < text.next_at or worker != text.worker):
            if text.shown:
                raise _begun_anew()
            text = self._texts[index] = _Text()
        text.worker, text.timing = worker, outcome.timing
        if text.gap or at > text.next_at:
            text.gap = True
            return
        text.next_at = at + 1
        text.grow(piece)
        self._tell(index)

    def end(self, index: int, result: Result | None, timing: Timing) -> None:
        """Takes in the whole text. Raises `RuntimeCrashed` where it is not what was told of it."""
        if result is None or len(result.records) != 1:
            raise Bug("the end of a text has no text")
        generated = whole(result.records[0])
        text = self._texts[index]
        told = "".join(text.told)
        if not generated.text.startswith(told):
            raise _begun_anew()
        rest = Piece(
            generated.text[len(told) :],
            max(0, generated.tokens - text.tokens),
            generated.logprobs[text.n_logprobs :],
        )
        if rest.text or rest.logprobs:
            text.grow(rest)
        text.end = End(generated, timing)
        self._tell(index)

    def take(self) -> list[Grown]:
        """What is new, the texts in the order in which they had news."""
        taken: list[Grown] = []
        for index in self._news:
            text = self._texts[index]
            grew = text.take()
            if grew is not None:
                taken.append((index, grew))
            if text.end is not None:
                taken.append((index, text.end))
        self._news.clear()
        self.changed.clear()
        return taken

    def _tell(self, index: int) -> None:
        self._news[index] = None
        self.changed.set()


def _begun_anew() -> RuntimeCrashed:
    return RuntimeCrashed(
        "the text began anew at another place after a part of it had been sent; send the request "
        "again for a whole one"
    )
