"""Which runtime serves each model on this worker.

An entry may list several. One is chosen when the entry comes, and stays while it serves: a small
difference never moves a model. One that turns out broken gives way to the next, for as long as the
worker lives; where all have failed, the first is next again. One that cannot run adapters gives
way to one that can once there are some, as soon as no copy is loaded, and serves again where that
one turns out broken: a model without its adapters is better than none. Owns what is chosen, and
why the others are not. Does not own the rule (`shoal.core.choice`), loading (`resident`), or what
happens to items that were prepared for another runtime (`intake`, `dispatch`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from shoal.catalog.schema import Entry
from shoal.catalog.variants import declared_token_s, on_runtime, runtimes_of
from shoal.core.choice import Candidate, choose
from shoal.errors import ShoalError
from shoal.worker.costs import CostBook
from shoal.worker.device import Device
from shoal.worker.faults import blames_runtime
from shoal.worker.servable import Installed

log = logging.getLogger(__name__)


class Choices:
    """What was chosen, by the models' keys.

    `on_switch` is called with an entry that another runtime serves from now on; `has_adapters`
    says whether a model, by its id, has some.
    """

    def __init__(self, installed: Installed, devices: Sequence[Device], costs: CostBook) -> None:
        self.on_switch: Callable[[Entry], None] = lambda _: None
        self.has_adapters: Callable[[str], bool] = lambda _: False
        self._installed = installed
        self._devices = devices
        self._costs = costs
        self._entries: dict[str, Entry] = {}
        self._chosen: dict[str, str] = {}
        self._others: dict[str, dict[str, str]] = {}
        self._broken: dict[str, dict[str, str]] = {}
        self._due: set[str] = set()

    def served(self, entry: Entry) -> Entry:
        """The entry as it is served here: by the same runtime each time, as long as it can."""
        if not entry.alternatives:
            return entry
        self._entries[entry.key] = entry
        chosen = self._chosen.get(entry.key)
        if chosen not in runtimes_of(entry):
            return on_runtime(entry, self._choose(entry))
        if self._is_due(entry, chosen):
            self._due.add(entry.key)
        else:
            self._due.discard(entry.key)
        return on_runtime(entry, chosen)

    def _is_due(self, entry: Entry, chosen: str) -> bool:
        """Whether the model has adapters that its runtime cannot run and another can."""
        if not self.has_adapters(entry.id):
            return False
        candidates = [self._candidate(entry, runtime) for runtime in runtimes_of(entry)]
        lacks = {one.runtime for one in candidates if one.lacks}
        return chosen in lacks and any(not (one.why_not or one.lacks) for one in candidates)

    def others(self, key: str) -> dict[str, str]:
        """The runtimes that could serve a model and do not, each with the reason."""
        return self._others.get(key, {})

    def has_choice(self, key: str) -> bool:
        """Whether a model's entry lists several runtimes."""
        return key in self._entries

    def forget(self, key: str) -> None:
        """The model is gone from the catalog."""
        for book in (self._entries, self._chosen, self._others, self._broken):
            book.pop(key, None)
        self._due.discard(key)

    @property
    def due(self) -> list[Entry]:
        """The models that another runtime is to serve once their copies have gone."""
        return [self.served(self._entries[key]) for key in self._due]

    def switch_due(self) -> None:
        """Has another runtime serve what is due and has no copy any more."""
        for key in list(self._due):
            if not self._copies(key) and not self._loads(key):
                self._due.discard(key)
                entry = self._entries[key]
                self.on_switch(on_runtime(entry, self._choose(entry)))

    def will_switch(self, entry: Entry, error: ShoalError) -> bool:
        """Whether an error at the start of an entry's runtime is for its load to act upon."""
        if not blames_runtime(error) or not self.has_choice(entry.key):
            return False
        return self._has_switched(entry) or bool(self._loads(entry.key))

    def take_over(self, entry: Entry, error: ShoalError) -> bool:
        """A load has failed: whether another runtime serves the model from now on.

        While a copy is loaded its runtime is not broken, and while another device loads one, that
        load decides. Where the last runtime has failed the first is next, after the pause that
        follows a failed load.
        """
        key = entry.key
        if not self.has_choice(key):
            return False
        if self._has_switched(entry):
            return True
        if self._copies(key):
            return False
        if self._loads(key) > 1:
            return True
        broken = self._broken.setdefault(key, {})
        broken[entry.runtime] = error.message
        listed = self._entries[key]
        chosen = self._choose(listed)
        untried = key in self._chosen
        if not untried:
            reasons = self._broken.pop(key)
            chosen = self._choose(listed)
            self._others[key] |= {name: why for name, why in reasons.items() if name != chosen}
        log.warning("%s does not load on %s: %s", key, entry.runtime, error.message)
        if chosen != entry.runtime:
            self.on_switch(on_runtime(listed, chosen))
        return untried

    def _has_switched(self, entry: Entry) -> bool:
        return self._chosen.get(entry.key, entry.runtime) != entry.runtime

    def _loads(self, key: str) -> int:
        return sum(key in device.loading for device in self._devices)

    def _copies(self, key: str) -> int:
        return sum(key in device.resident for device in self._devices)

    def _choose(self, entry: Entry) -> str:
        """Chooses anew; where none can serve, it is looked at again the next time."""
        candidates = [self._candidate(entry, runtime) for runtime in runtimes_of(entry)]
        choice = choose(candidates, self._chosen.pop(entry.key, None))
        if choice.why_not is None:
            self._chosen[entry.key] = choice.runtime
        if self._others.get(entry.key) != choice.others:
            said = "; ".join(f"{name}: {why}" for name, why in choice.others.items())
            log.info("%s is served by %s: %s", entry.key, choice.runtime, said)
        self._others[entry.key] = choice.others
        return choice.runtime

    def _candidate(self, entry: Entry, runtime: str) -> Candidate:
        alone = on_runtime(entry, runtime)
        why_not = self._why_not(alone, entry)
        wanted = why_not is None and self.has_adapters(entry.id)
        lacks = None
        if wanted and not self._installed.most_adapters(alone):
            lacks = "it does not run adapters, and the model has some"
        token_s = self._costs.known_token_s(alone) or declared_token_s(entry, runtime)
        return Candidate(runtime, why_not, token_s, lacks)

    def _why_not(self, alone: Entry, entry: Entry) -> str | None:
        """Why a runtime cannot serve."""
        broken = self._broken.get(entry.key, {}).get(alone.runtime)
        reason = broken or self._installed.why_not(alone)
        if reason is None and alone.runtime != entry.runtime:
            # An environment may be gigabytes: only that of the entry's own runtime comes unasked.
            reason = self._installed.unbuilt(alone.runtime)
        return reason
