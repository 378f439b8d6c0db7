"""How each model is scheduled: from its entry and its runtime's traits to the scheduler's rules.

Owns which models the scheduler knows, and their budgets. Does not own the scheduler
(`shoal.core.schedule`); a model that generates is none of it (`streams`).
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.catalog.schema import Entry
from shoal.core.baselines import BaselinePolicy
from shoal.core.line import ModelRule
from shoal.core.policy import Policy
from shoal.core.schedule import Scheduler
from shoal.core.types import Lane
from shoal.ipc.messages import Traits
from shoal.settings import WorkerSettings
from shoal.worker.costs import CostBook
from shoal.worker.lines import Line


def policy_of(settings: WorkerSettings, scheduler: Scheduler) -> Policy:
    """The scheduler, or the baseline that the settings ask for."""
    if settings.policy == "fair" or settings.policy == "oldest":  # noqa: PLR1714 - mypy narrows it
        return scheduler
    return BaselinePolicy(settings.policy, max_items=settings.window_items)


class Rules:
    """The scheduler's models."""

    def __init__(self, scheduler: Scheduler, costs: CostBook, *, window_items: int) -> None:
        self._scheduler = scheduler
        self._costs = costs
        self._window_items = window_items
        self._known: dict[str, str] = {}

    def on_traits(self, entry: Entry, traits: Traits) -> None:
        """How a model is scheduled is known once its runtime has said what it can do."""
        if self._known.get(entry.key) == entry.runtime or entry.generates:
            return
        self._known[entry.key] = entry.runtime  # nothing waits that was prepared for another one
        rule = self._rule(entry, packing=traits.packing)
        self._scheduler.add_model(rule, self._costs.model(entry))

    def on_entry(self, entry: Entry) -> None:
        """The entry of a model has changed."""
        if entry.key in self._known:
            packing = self._scheduler.packs(entry.key)
            self._scheduler.change_model(self._rule(entry, packing=packing))

    def forget(self, entry: Entry) -> None:
        """The model is gone, and nothing of it waits or runs."""
        self._known.pop(entry.key, None)
        self._scheduler.remove_model(entry.key)

    def set_budgets(self, lines: Mapping[tuple[str, Lane], Line]) -> None:
        """What changes slowly: how much a full batch of a line is."""
        for (model, lane), line in lines.items():
            if model in self._known:
                line.budget_tokens = self._scheduler.budget_tokens(model, lane)

    def _rule(self, entry: Entry, *, packing: bool) -> ModelRule:
        return ModelRule(
            entry.key,
            weight=entry.weight,
            packing=packing and entry.options.get("packing") is not False,
            block_tokens=entry.profile.batch_tokens,
            max_items=self._window_items,
            max_batch_tokens=entry.profile.max_batch_tokens,
        )
