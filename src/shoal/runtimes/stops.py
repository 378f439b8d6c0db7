"""Stop texts, found in a text that comes in pieces.

Owns holding back what may be the beginning of a stop text, so that nothing of one is ever sent.
Does not own when an engine is told to stop.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopText:
    """Feed it what an engine gives; it returns what may be sent on.

    `hit` is True once a stop text was found: what comes then is no part of the answer.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._most = max((len(stop) for stop in self._stops), default=1) - 1
        self._held = ""
        self.hit = False

    def feed(self, text: str) -> str:
        """What is certain to be part of the answer now; the earliest stop text ends it."""
        if self.hit:
            return ""
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)]
        keep = self._beginning(text)
        sure, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return sure

    def _beginning(self, text: str) -> int:
        """How many of the last characters could begin a stop text."""
        for size in range(min(self._most, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0

    def rest(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held
