"""Whose turn it is among those who share devices: start-time fair queueing (Goyal et al. 1996).

Everybody has an account of device seconds over weight, and the least one is next. The *virtual
time* is the least account among those that could run when the last batch was chosen. It only grows,
and whoever wakes takes the later of it and its own account: what was not used while nothing waited
is neither saved up nor held against anybody. Owns the accounts. Does not own who takes part when
(`schedule`).
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_DEBT_S = 2.0


class Account:
    """Device seconds over weight that a lane or a line has had. here: it takes part in turns."""

    __slots__ = ("here", "used_s", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.used_s = 0.0
        self.here = False

    def charge(self, device_s: float) -> None:
        """Adds device seconds, or takes some off again."""
        self.used_s += device_s / self.weight


class Turns:
    """The virtual time of those who take turns: the lanes, or the lines of one lane."""

    __slots__ = ("now_s",)

    def __init__(self) -> None:
        self.now_s = 0.0

    def wake(self, account: Account) -> None:
        """Lets somebody take part who did not: with nothing saved up."""
        if not account.here:
            account.here = True
            account.used_s = max(account.used_s, self.now_s)

    def step(self, able: Iterable[Account]) -> None:
        """A batch is about to be chosen among these, of whom there is one at least.

        Whoever could not run for long, for its devices were busy, keeps `MAX_DEBT_S` of what it
        missed.
        """
        accounts = list(able)
        for account in accounts:
            account.used_s = max(account.used_s, self.now_s - MAX_DEBT_S / account.weight)
        self.now_s = max(self.now_s, min(account.used_s for account in accounts))

    def debt_s(self, account: Account) -> float:
        """Device seconds that somebody is ahead."""
        return (account.used_s - self.now_s) * account.weight
