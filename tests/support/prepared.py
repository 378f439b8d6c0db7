"""Demo models as a worker and a runtime process see them: texts in, results out, no queue.

Owns loading an entry of the demo catalog in this process and preparing items for it. Holds no
assertions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.catalog.load import load
from shoal.catalog.resolve import model_spec, tokenizer_path
from shoal.catalog.schema import Entry
from shoal.errors import ShoalError
from shoal.ipc.messages import RunItem, Traits
from shoal.runtimes.interface import Runtime
from shoal.runtimes.registry import create
from shoal.wire.envelope import Envelope, Inputs, Params, Result
from shoal.wire.records import Entity, unpack
from shoal.worker.tokenise import Tokeniser, prepare
from tests.support.runtime_models import package_path


class Prepared:
    """One entry, loaded; `block_tokens` of every run as the entry's profile says."""

    def __init__(self, entry: Entry, cache_dir: Path) -> None:
        if entry.source.startswith("package://"):
            package_path(entry.source.removeprefix("package://"))  # skips where it is missing
        self.entry = entry
        self.runtime: Runtime = create(entry.runtime, "cpu", 1)
        self.runtime.load(model_spec(entry, cache_dir))
        self.tokeniser = Tokeniser(
            tokenizer_path(entry, cache_dir), entry.max_tokens, bare=entry.family == "static"
        )

    def item(self, task: str, inputs: Inputs, **params: Any) -> RunItem:
        """The item that a worker would make."""
        return run_item(self.entry, self.runtime.traits, self.tokeniser, task, inputs, **params)

    def run(self, task: str, inputs: Inputs, **params: Any) -> Result:
        """The item's result; its error is raised."""
        item = self.item(task, inputs, **params)
        (outcome,) = self.runtime.run(self.entry.key, [item]).outcomes
        if isinstance(outcome, ShoalError):
            raise outcome
        return outcome

    def entities(self, *texts: str, **params: Any) -> list[list[Entity]]:
        """What is found in each text."""
        result = self.run("extract", Inputs(texts=list(texts)), **params)
        return [unpack(record).entities for record in result.records]


def run_item(
    entry: Entry,
    traits: Traits,
    tokeniser: Tokeniser | None,
    task: str,
    inputs: Inputs,
    **params: Any,
) -> RunItem:
    """The item that a worker would make for a runtime with these traits."""
    envelope = Envelope(
        item="i",
        request="r",
        index=0,
        of=1,
        task=task,
        model=entry.id,
        revision=entry.revision,
        lane="interactive",
        cost_tokens=1,
        n_inputs=1,
        deadline_s=0.0,
        submitted_s=0.0,
        reply="",
        params=Params(**params),
    )
    made = prepare(entry, traits, tokeniser, envelope, inputs).run_item
    assert made is not None
    return made


def demo(model: str, cache_dir: Path) -> Prepared:
    """An entry of the demo catalog, loaded."""
    (entry,) = [entry for entry in load(None).entries if entry.id == model]
    return Prepared(entry, cache_dir)
