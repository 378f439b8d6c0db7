"""Which tests of a parallel run share a process, and which begin first.

What is expensive to start is started once: tests that share a fixture wider than one test run in
one process, one after the other. What takes longest begins first, by what `make times` wrote down,
so that no process is left alone with it at the end. Owns these two rules, not the fixtures.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

TIMES = Path(__file__).parents[1] / "times.json"
# A file that takes longer is taken apart where its tests share nothing.
_LONG_S = 10.0
# Fixtures that tests of several files share.
_SHARED = ("live_server",)


def module_of(nodeid: str) -> str:
    """The file of a test."""
    return nodeid.partition("::")[0]


def read_times() -> dict[str, float]:
    """Seconds by file, as they were written down; what is not there is new."""
    return json.loads(TIMES.read_text("utf-8")) if TIMES.is_file() else {}


def group_of(item: pytest.Item, times: dict[str, float]) -> str:
    """The name of the group that a test runs with."""
    module = module_of(item.nodeid)
    fixtures = getattr(item, "fixturenames", ())
    for name in _SHARED:
        if name in fixtures:
            return name
    found = getattr(item, "_fixtureinfo", None)
    definitions = found.name2fixturedefs if found is not None else {}
    shares = any(
        defined[-1].scope != "function" and defined[-1].baseid == module
        for defined in definitions.values()
        if defined
    )
    if shares or times.get(module, 0.0) < _LONG_S:
        return module
    return item.nodeid


def longest_first(items: list[pytest.Item], times: dict[str, float]) -> None:
    """Sorts tests by the time of their files; what is new stands before what is short."""
    items.sort(key=lambda item: -times.get(module_of(item.nodeid), _LONG_S))
