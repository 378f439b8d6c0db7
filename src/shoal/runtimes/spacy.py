"""The runtime `spacy`: entities of texts by a spaCy pipeline's `ner` part.

spaCy's entity recogniser takes a sequence of decisions and gives no probabilities: the score of
every entity is 1. Owns loading only the parts that are needed, and the records. Does not own
tokenising, which is the pipeline's.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from shoal.core.types import Task
from shoal.errors import InputTooLong, ModelUnavailable
from shoal.ipc.messages import ModelSpec, RunItem, Traits
from shoal.runtimes.holding import HoldingRuntime, Model, Outcomes, each, each_text
from shoal.runtimes.labels import wanted
from shoal.wire.envelope import Result
from shoal.wire.records import Entity, Record, pack

ABOUT = {"spacy": "entities of texts: the recogniser of a spaCy pipeline"}
_CURE = "pip install 'shoal[spacy]'"
_RECOGNISER = "ner"
_CERTAIN = 1.0


class SpacyRuntime(HoldingRuntime):
    """Finds entities. It computes on one thread, whatever it is given."""

    name = "spacy"
    needs: ClassVar[dict[str, str]] = {"spacy": _CURE}
    tasks: ClassVar[tuple[Task, ...]] = ("extract",)

    def __init__(self, *, device: str, threads: int) -> None:
        traits = Traits(accepts_ids=False, tasks=list(self.tasks))
        super().__init__(traits, device=device, threads=threads)
        self.version = version("spacy")

    def open(self, spec: ModelSpec) -> Model:
        """Opens the pipeline in the model's folder."""
        return _Recogniser(Path(spec.path), spec.key)


class _Recogniser:
    def __init__(self, folder: Path, key: str) -> None:
        import spacy

        try:
            config = spacy.util.load_config(folder / "config.cfg")
            parts = config["nlp"]["pipeline"]
            if _RECOGNISER not in parts:
                raise ModelUnavailable(f"{key}: {folder} has no part `{_RECOGNISER}`: {parts}")
            others = [part for part in parts if part not in _needed(config)]
            self._pipeline: Any = spacy.load(folder, exclude=others)
        except (OSError, ValueError) as error:
            raise ModelUnavailable(f"{key}: {folder} is no spaCy pipeline: {error}") from error
        self._labels = sorted(self._pipeline.get_pipe(_RECOGNISER).labels)
        self.memory_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    def run(self, items: Sequence[RunItem]) -> Outcomes:
        """A record with the entities of every text."""
        return each(items, self._answer)

    def _answer(self, item: RunItem) -> Result:
        labels = wanted(self._labels, item.params.labels)
        return Result(records=each_text(item, lambda text: pack(self._record(text, labels))))

    def _record(self, text: str, labels: frozenset[str]) -> Record:
        most = self._pipeline.max_length
        if len(text) > most:
            raise InputTooLong(f"the input has {len(text)} characters and the model takes {most}")
        found = self._pipeline(text).ents
        return Record(
            entities=[
                Entity(one.label_, one.start_char, one.end_char, _CERTAIN)
                for one in found
                if one.label_ in labels
            ]
        )


def _needed(config: Any) -> set[str]:
    """The recogniser, and the part with the vectors of tokens where it listens to one."""
    listens = config["components"][_RECOGNISER]["model"].get("tok2vec", {})
    architecture = str(listens.get("@architectures", ""))
    if "Listener" not in architecture:
        return {_RECOGNISER}
    upstream = listens.get("upstream", "*")
    return {_RECOGNISER, *(config["components"] if upstream == "*" else [upstream])}
