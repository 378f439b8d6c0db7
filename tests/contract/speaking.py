"""A runtime that generates, in its own process: texts begun, heard as they grow, and stopped.

Owns starting texts as a worker does (never more than there are slots) and keeping what the process
said. Does not own the process (`process`), the prompts (`speakers`) or the claims (the tests).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from shoal.errors import ShoalError
from shoal.ipc.messages import Answer, Failed, Finished, Grown, Loaded, RunItem
from shoal.wire.envelope import Params
from shoal.wire.generation import ChatMessage, Generated, Generation, Piece
from tests.contract.process import Process
from tests.contract.speakers import Speaker

_HEARD = 20_000


@dataclass(slots=True)
class Said:
    """What became of one item: its pieces as they came, and the whole or the error."""

    pieces: list[Piece] = field(default_factory=list)
    whole: Generated | ShoalError | None = None

    @property
    def generated(self) -> Generated:
        """The whole; an error is raised."""
        if isinstance(self.whole, ShoalError):
            raise self.whole
        assert self.whole is not None
        return self.whole

    @property
    def text(self) -> str:
        """Its text; an error is raised."""
        return self.generated.text


class Speaking(Process):
    """A process with the subject's model loaded."""

    def __init__(self, subject: Speaker, folder: Path) -> None:
        super().__init__(subject.runtime, folder)
        self.subject = subject
        self.loaded: Loaded | None = None
        self.heard: deque[Answer] = deque(maxlen=_HEARD)
        self._names = count()

    def start(self) -> None:
        """Starts it, loads the model and listens from then on. Raises what the runtime says."""
        super().start()
        self.loaded = self.load(self.subject.entry)
        connection, matched = self.connection, self.connection._on_answer

        def listen(answer: Answer) -> None:
            self.heard.append(answer)
            matched(answer)

        connection._on_answer = listen

    @property
    def slots(self) -> int:
        """How many texts may grow at once."""
        assert self.loaded is not None
        return self.loaded.slots

    def item(self, prompt: str, adapter: str = "", **asked: Any) -> RunItem:
        """An item as a worker makes it; without chance, and `tokens` long, unless told else."""
        how = {"max_tokens": self.subject.tokens, "temperature": 0.0} | asked
        return RunItem(
            *(f"i{next(self._names)}", "generate", [len(prompt.split())]),
            texts=[prompt],
            params=Params(generation=Generation(**how)),
            adapter=adapter,
        )

    def chat(self, turns: list[ChatMessage]) -> RunItem:
        """An item that is a conversation."""
        return replace(self.item(""), texts=[], chat=turns)

    def renamed(self, item: RunItem) -> RunItem:
        """The item under a name that no other has."""
        return replace(item, item=f"i{next(self._names)}")

    async def growing(self, item: RunItem, said: Said) -> Said:
        """Generates for one item into `said`."""
        try:
            said.whole = await self.connection.generate(
                self.subject.entry.key, item, said.pieces.append
            )
        except ShoalError as error:
            said.whole = error
        return said

    async def _all(self, items: Sequence[RunItem]) -> list[Said]:
        free = asyncio.Semaphore(self.slots)

        async def one(item: RunItem) -> Said:
            async with free:
                return await self.growing(item, Said())

        return await asyncio.gather(*map(one, items))

    def say(self, *items: RunItem) -> list[Said]:
        """What becomes of items that are there at once."""
        return self.wait(self._all(items))

    def drive(self, steps: Coroutine[Any, Any, None]) -> None:
        """Runs a test's own steps in the loop of this process."""
        self.wait(steps)

    @cached_property
    def alone(self) -> dict[str, Generated]:
        """The whole for each of the subject's prompts, each said by itself."""
        return {prompt: self.say(self.item(prompt))[0].generated for prompt in self.subject.prompts}

    def calls(self) -> dict[int, list[Answer]]:
        """What was heard of each call that began a text, in order."""
        found: dict[int, list[Answer]] = {}
        for answer in self.heard:
            if isinstance(answer, Grown | Finished | Failed):
                found.setdefault(answer.seq, []).append(answer)
        return found
