"""What a bakeoff runs on a generator: one text alone, and several that grow at once.

Owns the prompts, the measuring, and comparing texts. Does not own the runtimes' processes or the
table (`bakeoff`).
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path
from typing import ClassVar

from shoal.catalog.schema import Entry
from shoal.cli.samples import make_item, sentences
from shoal.clock import monotonic
from shoal.errors import Bug
from shoal.ipc.client import RuntimeConnection
from shoal.ipc.messages import Loaded, RunItem, Traits
from shoal.wire.envelope import Inputs, Params
from shoal.wire.generation import ChatMessage, Generated, Generation

STREAMS = (1, 4, 16)  # texts that grow at once
_FIRST_PROMPT = "what a shoal is."
_TOKENS = 32
_PROMPTS = 4


@dataclass(frozen=True, slots=True)
class GenerateFound:
    """What was measured on one runtime.

    first_token_s: of a text that is alone. tokens_per_s: of so many texts at once, by their number;
    of more than the runtime has slots for, the rest waits. same: the share of the likeliest texts
    that is as on the first runtime.
    """

    TITLES: ClassVar[tuple[str, ...]] = ("SLOTS", "TOKEN", *(f"AT {n}" for n in STREAMS), "SAME")

    slots: int
    first_token_s: float
    tokens_per_s: dict[int, float]
    same: float

    def cells(self) -> tuple[str, ...]:
        """As in the table."""
        rates = (f"{rate:,.1f}/s" for rate in self.tokens_per_s.values())
        return (str(self.slots), f"{self.first_token_s:.3f} s", *rates, f"{self.same:.2f}")


class GenerateRun:
    """The same prompts for each runtime. seconds: for each number of texts at once."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._entry: Entry | None = None
        self._traits: Traits | None = None
        self._numbers = count()
        self._reference: list[str] | None = None

    def make_ready(self, entry: Entry, traits: Traits, cache_dir: Path) -> None:
        """Another runtime is measured from now on."""
        del cache_dir  # engines tokenise themselves
        self._entry, self._traits = entry, traits

    async def first(self, connection: RuntimeConnection) -> None:
        """The first token after a load."""
        await self._grow(connection, _FIRST_PROMPT, 1)

    async def measure(self, connection: RuntimeConnection, loaded: Loaded) -> GenerateFound:
        """What the runtime does."""
        texts, waits_s = [], []
        for prompt in sentences()[:_PROMPTS]:
            generated, wait_s = await self._grow(connection, prompt, _TOKENS)
            texts.append(generated.text)
            waits_s.append(wait_s)
        rates = {
            streams: await self._tokens_per_s(connection, min(streams, loaded.slots or 1))
            for streams in STREAMS
        }
        if self._reference is None:
            self._reference = texts
        return GenerateFound(
            loaded.slots, statistics.median(waits_s), rates, same_share(texts, self._reference)
        )

    async def _tokens_per_s(self, connection: RuntimeConnection, streams: int) -> float:
        """Tokens per second of so many texts at once; one that ends is followed by another.

        Counted until the first moment after the time at which a text has no successor: from then
        on fewer of them grow.
        """
        prompts, begun_s = cycle(sentences()), monotonic()
        ends = [
            asyncio.create_task(self._follow(connection, prompts, begun_s + self._seconds))
            for _ in range(streams)
        ]
        told = await asyncio.gather(*ends)
        end_s = min(pieces[-1][0] for pieces in told)
        tokens = sum(tokens for pieces in told for at_s, tokens in pieces if at_s <= end_s)
        return tokens / (end_s - begun_s)

    async def _follow(
        self, connection: RuntimeConnection, prompts: Iterator[str], until_s: float
    ) -> list[tuple[float, int]]:
        """One text after another: moments and how many tokens came then."""
        pieces: list[tuple[float, int]] = []
        while not pieces or monotonic() < until_s:
            item = self._item(next(prompts), _TOKENS)
            await connection.generate(
                self._key, item, lambda piece: pieces.append((monotonic(), piece.tokens))
            )
            pieces.append((monotonic(), 0))
        return pieces

    async def _grow(
        self, connection: RuntimeConnection, prompt: str, tokens: int
    ) -> tuple[Generated, float]:
        """A whole text, and the seconds until its first piece."""
        begun_s = monotonic()
        moments: list[float] = []
        generated = await connection.generate(
            self._key, self._item(prompt, tokens), lambda _: moments.append(monotonic())
        )
        return generated, (moments[0] if moments else monotonic()) - begun_s

    @property
    def _key(self) -> str:
        if self._entry is None:
            raise Bug("no runtime is ready to be measured")
        return self._entry.key

    def _item(self, prompt: str, tokens: int) -> RunItem:
        if self._entry is None or self._traits is None:
            raise Bug("no runtime is ready to be measured")
        how = Generation(max_tokens=tokens, temperature=0.0, stream=True)
        return make_item(
            *(self._entry, self._traits, None),
            Inputs(chats=[[ChatMessage("user", f"Explain this: {prompt}")]]),
            Params(generation=how),
            name=str(next(self._numbers)),
        )


def same_share(ours: Sequence[str], theirs: Sequence[str]) -> float:
    """How much of texts is the same from their beginning on: the mean share of characters."""
    return statistics.fmean(_same(a, b) for a, b in zip(ours, theirs, strict=True))


def _same(a: str, b: str) -> float:
    same = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return (min(len(a), len(b)) if same is None else same) / max(1, len(a), len(b))
