"""What is known of a runtime before it has ever run: on what, for which tasks, with which adapters.

Owns the form in which an environment's probe says it. Does not own finding out
(`shoal.runtimes.registry`), or what follows from it (the worker's `servable`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from shoal.core.adapters import MAX_RESIDENT_ADAPTERS
from shoal.core.types import Task
from shoal.errors import ModelUnavailable


class Adapts(msgspec.Struct, frozen=True):
    """Which models a runtime takes adapters for, and how many beside one copy.

    tasks: models of other tasks get none; empty: there is no such bound. bare_weights: suffixes of
    files whose models get none; bare_families: so with families. usual: how many, unless the option
    `max_adapters` says it.
    """

    tasks: list[Task] = []
    bare_weights: list[str] = []
    bare_families: list[str] = []
    usual: int = MAX_RESIDENT_ADAPTERS

    def most(
        self,
        tasks: Collection[Task],
        weights: str,
        options: Mapping[str, bool | int | float | str],
        family: str | None = None,
    ) -> int:
        """How many adapters a copy of such a model has at once; 0: it takes none.

        weights: the file, or the source that has it. family: None where nobody has said it.
        Raises `ModelUnavailable` where the option is no number.
        """
        most = options.get("max_adapters", self.usual)
        if not isinstance(most, int) or isinstance(most, bool) or most < 0:
            raise ModelUnavailable(f"option max_adapters is {most!r}, no whole number from 0 on")
        if self.tasks and not set(tasks) <= set(self.tasks):
            return 0
        if family in self.bare_families:
            return 0
        return 0 if weights.endswith(tuple(self.bare_weights)) else most


class Facts(msgspec.Struct, frozen=True):
    """A runtime of an environment.

    why_not: why it cannot run there. devices: kinds of device that it computes on (`cpu`, `cuda`);
    none named: on all. tasks: those that it serves; none named: nobody knows. adapts: None where it
    takes no adapters.
    """

    why_not: str | None = None
    devices: list[str] = []
    tasks: list[Task] = []
    adapts: Adapts | None = None
