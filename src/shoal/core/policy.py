"""What drives devices, as a worker and a simulator see it.

Owns the protocol of the scheduler and of the baselines that it is compared with. Does not own any
of them (`schedule`, `baselines`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, Protocol

from shoal.core.types import Batch, Item

# Of a model: on a device that is free now; on devices that are all busy; on none.
Place = Literal["free", "busy", "absent"]
Where = Callable[[str], Place]


class Policy(Protocol):
    """What drives devices: the scheduler, and the baselines that it is compared with."""

    def add(self, item: Item, now: float) -> bool:
        """Takes an item in; False when its window is full."""

    def remove(self, item_ids: Iterable[str]) -> list[Item]:
        """Takes items out that nobody waits for."""

    def expire(self, now: float, where: Where) -> list[Item]:
        """Takes out what is late, after the free devices have taken what they could."""

    def next_batch(self, now: float, free_devices: int, where: Where) -> Batch | None:
        """The batch for one of the devices that are free; None when there is none now."""

    def deadline(self, now: float) -> float | None:
        """When `next_batch` may say something else although nothing was added; None for never."""

    def finished(
        self, batch: Batch, took_s: float | None, now: float, *, learn: bool = True
    ) -> None:
        """A batch has left its device after `took_s` device seconds (None: it was lost).

        learn: that time says something of what such a batch costs.
        """
