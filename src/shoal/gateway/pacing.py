"""How much of each tenant's work lies in a line at once.

The broker's line is first in, first out: what lies there goes before whatever comes. So of a large
request, or of a tenant's many, a gateway puts as much into the line as keeps the devices busy, and
the rest follows as outcomes come; meanwhile whoever else comes goes in at once. Within a tenant the
requests take turns, an item each, and the first item of a request has some room beyond the window:
a small call does not wait at the gateway for a large one. Tenants share the window of a line, and
gateways share it by what they tell each other of their work there.

Owns what is in the lines of this gateway, and who waits to be let in. Does not own how large a
window is (`backlog`), or sending (`submit`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.gateway.backlog import Line

FIRST_ROOM = 1.34


@dataclass(slots=True)
class _Share:
    """A tenant's part of a line. size: of what lies there. waiting: who comes next, and how large.

    No more wait than there are open requests: each has one item here at a time.
    """

    size: float = 0.0
    waiting: dict[asyncio.Future[None], float] = field(default_factory=dict)


class Pacing:
    """What lies in lines. window: how much of this gateway's may lie in one, in sizes of items."""

    def __init__(self, window: Callable[[Line], float]) -> None:
        self._window = window
        self._lines: dict[Line, dict[str | None, _Share]] = {}
        self._n_waiting: dict[Line, int] = {}

    async def enter(
        self,
        line: Line,
        tenant: str | None,
        size: float,
        over: asyncio.Future[None],
        *,
        first: bool = False,
    ) -> bool:
        """Waits until an item may be put into the line; False where `over` is done before.

        One item always may where nothing of its tenant's is there. first: of its request.
        """
        shares = self._lines.setdefault(line, {})
        share = shares.setdefault(tenant, _Share())
        if (first or not share.waiting) and self._has_room(line, share, size, first=first):
            share.size += size
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        share.waiting[turn] = size
        self._n_waiting[line] = self._n_waiting.get(line, 0) + 1

        def give_up(_: object) -> None:
            turn.cancel()

        over.add_done_callback(give_up)
        try:
            await turn
        except asyncio.CancelledError:
            self._give_up(line, tenant, turn, size)
            if over.done() and not _is_cancelled():
                return False
            raise
        finally:
            over.remove_done_callback(give_up)
        return True

    def leave(self, line: Line, tenant: str | None, size: float) -> None:
        """An item has left the line: it is done, or nobody waits for it."""
        shares = self._lines.get(line, {})
        share = shares.get(tenant)
        if share is None:
            return
        share.size = max(0.0, share.size - size)
        if not share.waiting and share.size <= 0.0:
            del shares[tenant]
        if not shares:
            self._lines.pop(line, None)
        if self._n_waiting.get(line):  # who leaves makes room for other tenants, too
            for other in list(shares.values()):
                self._let_in(line, other)

    def _give_up(
        self, line: Line, tenant: str | None, turn: asyncio.Future[None], size: float
    ) -> None:
        """Somebody waits no more; one who was let in at that very moment leaves again."""
        waited = turn in self._lines[line][tenant].waiting
        if waited:
            self._forget(line, self._lines[line][tenant], turn)
        self.leave(line, tenant, 0.0 if waited or turn.cancelled() else size)

    def _let_in(self, line: Line, share: _Share) -> None:
        while share.waiting:
            turn, size = next(iter(share.waiting.items()))
            if not turn.done() and not self._has_room(line, share, size):
                return
            self._forget(line, share, turn)
            if not turn.done():
                share.size += size
                turn.set_result(None)

    def _forget(self, line: Line, share: _Share, turn: asyncio.Future[None]) -> None:
        del share.waiting[turn]
        self._n_waiting[line] -= 1
        if not self._n_waiting[line]:
            del self._n_waiting[line]

    def _has_room(self, line: Line, share: _Share, size: float, *, first: bool = False) -> bool:
        if share.size <= 0.0:
            return True
        most = self._window(line) / len(self._lines[line])
        return share.size + size <= most * (FIRST_ROOM if first else 1.0)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
