"""Questions and answers of the Debian FAQ, for spot checks of retrieval.

Owns finding its pages (Debian's package `debian-faq`) and reading them. Holds no assertions.
"""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

FOLDER = Path("/usr/share/doc/debian/FAQ")
SHORTEST_ANSWER = 80  # characters; what is less only announces its subsections
_TITLES = ("h2", "h3", "h4", "h5")
_NUMBER = re.compile(r"^[\d. ]+")


class _Sections(HTMLParser):
    """The title and the text of every section of a page; a subsection is one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[list[str], list[str]]] = []
        self._into: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        kind = dict(attrs).get("class")
        if tag == "div" and kind == "section":
            self.found.append(([], []))
            self._into = None
        elif tag == "div" and kind == "navfooter":
            self._into = None
        elif tag in _TITLES and self.found and not self.found[-1][0]:
            self._into = self.found[-1][0]

    def handle_endtag(self, tag: str) -> None:
        if tag in _TITLES and self.found and self._into is self.found[-1][0]:
            self._into = self.found[-1][1]

    def handle_data(self, data: str) -> None:
        if self._into is not None:
            self._into.append(data)


def questions_and_answers() -> list[tuple[str, str]]:
    """All (question, answer) in English; skips where the package is missing, fails in CI."""
    pages = sorted(FOLDER.glob("*.en.html"))
    if not pages:
        message = "Debian's package debian-faq is not installed"
        if "CI" in os.environ:
            pytest.fail(message)
        pytest.skip(message)
    found = []
    for path in pages:
        sections = _Sections()
        sections.feed(path.read_text(encoding="utf-8"))
        found += [(_line(title), _line(text)) for title, text in sections.found]
    return [
        (_NUMBER.sub("", question), answer)
        for question, answer in found
        if question and len(answer) > SHORTEST_ANSWER
    ]


def _line(pieces: list[str]) -> str:
    return " ".join(" ".join(pieces).split())
