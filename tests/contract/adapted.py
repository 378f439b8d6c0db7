"""A runtime that takes adapters, in its own process: the same questions with and without them.

Owns loading adapters and asking with several of them at once, whether the model answers in batches
or generates. Does not own either of those (`hosted`, `speaking`), or the claims (the tests).
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import structs

from shoal.errors import ShoalError
from shoal.ipc.messages import AdapterSpec, Loaded, RunItem
from tests.contract.adapters import Adaptable, Folders
from tests.contract.hosted import Hosted, answer, same
from tests.contract.speakers import Speaker
from tests.contract.speaking import Speaking

BARE = ""


class Adapted:
    """A process with a model loaded, and the adapters that were made for it."""

    def __init__(self, about: Adaptable, folder: Path) -> None:
        subject = about.subject
        self.subject = subject
        self.process: Hosted | Speaking = (
            Speaking(subject, folder) if isinstance(subject, Speaker) else Hosted(subject, folder)
        )
        self.reference = about.reference
        self._about = about
        self._folder = folder

    def start(self) -> None:
        """Starts it and loads the model."""
        self.process.start()

    def leave(self) -> None:
        """Stops it."""
        self.process.leave()

    @property
    def hello(self) -> Any:
        """Who the process says it is."""
        return self.process.hello

    @cached_property
    def folders(self) -> Folders:
        """Adapters of this model, and folders that are none."""
        return self._about.folders(self._folder / "adapters")

    @cached_property
    def bare(self) -> list[Any]:
        """The answers of the model itself to the first two inputs, before there was an adapter."""
        return [self.ask((at, BARE))[0] for at in (0, 1)]

    def key(self, name: str, revision: str = "1") -> str:
        """The key of an adapter of this model."""
        return f"{self.subject.entry.id}@{name}@{revision}"

    def load(self, key: str, path: Path) -> Loaded:
        """Loads an adapter. Raises what the runtime says of it."""
        spec = AdapterSpec(key, str(path))
        return self.process.wait(self.process.connection.load_adapter(self.subject.entry.key, spec))

    def unload(self, *keys: str) -> None:
        """Unloads adapters."""
        for key in keys:
            self.process.wait(self.process.connection.unload_adapter(self.subject.entry.key, key))

    def ask(self, *asked: tuple[int, str]) -> list[Any]:
        """Answers or errors, all asked at once: an input's number, and the key of an adapter."""
        items = [self._item(at, adapter) for at, adapter in asked]
        if isinstance(self.process, Hosted):
            outcomes = self.process.run(items)
            return [o if isinstance(o, ShoalError) else answer(o) for o in outcomes]
        said = self.process.say(*items)
        return [one.whole if isinstance(one.whole, ShoalError) else one.text for one in said]

    def _item(self, at: int, adapter: str) -> RunItem:
        if isinstance(self.process, Hosted):
            item = self.process.item(self.process.subject.inputs[at])
            return structs.replace(item, adapter=adapter)
        return self.process.item(self.process.subject.prompts[at], adapter)

    @staticmethod
    def same(one: Any, other: Any) -> bool:
        """Whether two answers are; an error is the same as nothing."""
        if isinstance(one, ShoalError) or isinstance(other, ShoalError):
            return False
        return one == other if isinstance(one, str) else same(one, other)
