"""Whose turn it is among those who come and go in a window: tenants, and the requests of one.

Everybody has an account of tokens, and the least one is next. The virtual time grows by what is
served over the number of those who are here (fair queueing, Demers et al. 1989), and whoever comes
takes the later of it and its own account. So nobody saves up, and a stream of ever new ones does
not keep an old one from its share. Owns the accounts of one level. Does not own items (`batching`),
or the accounts of lines and lanes, whose time is the devices' (`turns`).
"""

from __future__ import annotations

_MOST_GONE = 64


class Shares:
    """Accounts by name. Only names that are here take turns."""

    __slots__ = ("_used", "here", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.here: set[str] = set()
        self._used: dict[str, float] = {}

    def enter(self, name: str) -> None:
        """Somebody comes, with nothing saved up."""
        if name not in self.here:
            if len(self._used) > 2 * len(self.here) + _MOST_GONE:  # who is gone and not ahead
                self._used = {n: u for n, u in self._used.items() if n in self.here or u > self.now}
            self._used[name] = max(self._used.get(name, 0.0), self.now)
            self.here.add(name)

    def leave(self, name: str) -> None:
        """Nothing of somebody is here any more."""
        self.here.discard(name)

    def used(self, name: str) -> float:
        """The account of one that is here."""
        return self._used[name]

    def is_ahead(self, name: str) -> bool:
        """Whether one that is here has had more than its share."""
        return self._used[name] > self.now + 1e-9

    def serve(self, tokens: dict[str, int]) -> None:
        """So many tokens of each go now."""
        self.now += sum(tokens.values()) / max(1, len(self.here))
        for name, n in tokens.items():
            self._used[name] += n
        if self.here:
            self.now = max(self.now, min(self._used[name] for name in self.here))
