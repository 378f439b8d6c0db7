"""A device: what is loaded on it, what is on its way, and what runs.

Owns when it can take a batch. Does not own its name (`devices`), its processes' lives
(`supervise`), or what is loaded there (`resident`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.catalog.schema import Entry
from shoal.worker.supervise import RuntimeProcess

IN_FLIGHT_BATCHES = 2
_LEAST_LEAD_S = 0.003


def _lead_s(expected_s: float) -> float:
    """How long before a batch's expected end its successor is formed.

    Sending one takes a while, and the estimate is off by a tenth or so.
    """
    return max(_LEAST_LEAD_S, 0.1 * expected_s)


@dataclass(slots=True, eq=False)
class Sent:
    """A batch on a device. begun: it runs; else it waits for the one before it in its process.

    process: the name of the runtime process. on_begun: called once, when it begins.
    """

    expected_s: float
    model: str = ""
    process: str = ""
    begun: bool = False
    on_begun: Callable[[], None] | None = None

    def begin(self) -> None:
        """It runs."""
        self.begun = True
        if self.on_begun is not None:
            self.on_begun()


@dataclass(slots=True)
class Loaded:
    """A model on a device. since_s, used_s: of its load and of its last batch or text.

    slots, kv_tokens: of a generator, what can grow in it at once. texts: how many do.
    """

    entry: Entry
    size_bytes: int
    since_s: float
    used_s: float
    slots: int = 0
    kv_tokens: int = 0
    texts: int = 0


@dataclass(slots=True)
class Loading:
    """A load under way. phase: for people. in_runtime: its runtime process is at it."""

    entry: Entry
    begun_s: float
    phase: str = "loading"
    in_runtime: bool = False

    def on_building(self, step: str) -> None:
        """The runtime's bundle is being built."""
        self.phase = f"building the bundle: {step}"


@dataclass(slots=True)
class Device:
    """A device and what runs on it; models go by their keys.

    closing: models that get no more batches here, for the plan wants them idle. leaving: those
    whose eviction has begun. sent: the batches that are not answered, the one that runs first.
    leading: the first of them, once it runs. stage_s: when that is about to end.
    """

    name: str
    processes: dict[str, RuntimeProcess] = field(default_factory=dict)
    resident: dict[str, Loaded] = field(default_factory=dict)
    loading: dict[str, Loading] = field(default_factory=dict)
    closing: set[str] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)
    sent: deque[Sent] = field(default_factory=lambda: deque(maxlen=IN_FLIGHT_BATCHES))
    leading: Sent | None = None
    stage_s: float = 0.0

    @property
    def in_flight(self) -> int:
        """Batches sent and not answered."""
        return len(self.sent)

    def holds(self, model: str) -> bool:
        """Whether a model is loaded here, and may get batches.

        None while its process loads another: a batch would wait there, and seem to hang.
        """
        loaded = self.resident.get(model)
        if loaded is None or model in self.closing or model in self.leaving:
            return False
        process = loaded.entry.process
        return not any(
            load.in_runtime and load.entry.process == process for load in self.loading.values()
        )

    def is_busy(self, model: str) -> bool:
        """Whether a batch of a model runs here or waits here, or a text of it grows."""
        loaded = self.resident.get(model)
        return any(sent.model == model for sent in self.sent) or bool(loaded and loaded.texts)

    def is_free(self, now_s: float) -> bool:
        """Whether it can take a batch: it idles, or is about to."""
        if self.in_flight == 0:
            return True
        return self.in_flight < IN_FLIGHT_BATCHES and now_s >= self.stage_s

    def on_sent(self, expected_s: float, now_s: float, model: str = "", process: str = "") -> Sent:
        """A batch has left for it."""
        sent = Sent(expected_s, model, process)
        self.sent.append(sent)
        self._begin(now_s)
        return sent

    def on_back(self, sent: Sent, now_s: float, *, lost: bool) -> None:
        """A batch has come back, or was lost with its process."""
        self.sent.remove(sent)
        if sent.model in self.resident:
            self.resident[sent.model].used_s = now_s
        self._begin(now_s, lost=sent.process if lost else None)

    def _begin(self, now_s: float, lost: str | None = None) -> None:
        """The first batch of each process runs, but of a process that is lost."""
        processes = {lost}
        for sent in self.sent:
            if sent.process not in processes and not sent.begun:
                sent.begin()
            processes.add(sent.process)
        if self.sent and self.sent[0].begun and self.sent[0] is not self.leading:
            self.leading = self.sent[0]
            expected_s = self.leading.expected_s
            self.stage_s = now_s + expected_s - _lead_s(expected_s)
