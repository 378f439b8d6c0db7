"""Where the time of a test run goes: by file, by fixture, by kind of process that is started.

    pytest --times        prints the tables, and writes the seconds of each file to tests/times.json

A plugin for the processes of a parallel run and for the one that starts them. Owns measuring and
printing. Does not own what is done with the seconds (`sharing`).
"""

from __future__ import annotations

import json
import resource
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support.sharing import TIMES, module_of, read_times

ROOT = TIMES.parents[1]
_ROWS = 30
_FIELD = "shoal_times"


class Times:
    """Counts and seconds of one process, and of those that it has started.

    rows: (table, name) -> [count, wall seconds, processor seconds].
    """

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        started = subprocess.Popen.__init__

        def counted(process: Any, argv: Any, *arguments: Any, **named: Any) -> None:
            self._add("process", _kind(argv), 0.0, 0.0)
            started(process, argv, *arguments, **named)

        subprocess.Popen.__init__ = counted  # type: ignore[method-assign]

    def _add(self, table: str, name: str, wall_s: float, cpu_s: float) -> None:
        row = self.rows[table, name]
        row[0] += 1
        row[1] += wall_s
        row[2] += cpu_s

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measures a test with what is made for it; processes count when they have ended."""
        begun_s, before_s = time.monotonic(), _cpu_s()
        answer = yield
        module = module_of(item.nodeid.partition("@")[0])
        self._add("file", module, time.monotonic() - begun_s, _cpu_s() - before_s)
        return answer

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """Measures the making of what several tests share."""
        begun_s, before_s = time.monotonic(), _cpu_s()
        answer = yield
        if fixturedef.scope != "function":
            name = f"{fixturedef.argname} ({fixturedef.baseid or 'pytest'})"
            self._add("fixture", name, time.monotonic() - begun_s, _cpu_s() - before_s)
        return answer

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hands over what this process has measured."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_FIELD] = [[*key, *row] for key, row in self.rows.items()]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Adds what another process has measured."""
        for table, name, *numbers in getattr(node, "workeroutput", {}).get(_FIELD, []):
            row = self.rows[table, name]
            for at, number in enumerate(numbers):
                row[at] += number

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Prints the tables, and writes the times of files down."""
        for table in ("file", "fixture", "process"):
            rows = [(name, *row) for (kind, name), row in self.rows.items() if kind == table]
            rows.sort(key=lambda row: (-row[2], -row[1]))
            total = [sum(row[at] for row in rows) for at in (1, 2, 3)]
            terminalreporter.write_sep("=", f"where the time goes, by {table}")
            for name, *row in [*rows[:_ROWS], ("all", *total)]:
                terminalreporter.write_line(_line(name, row))
        now = {name: round(row[1], 1) for (kind, name), row in self.rows.items() if kind == "file"}
        kept = {name: s for name, s in read_times().items() if (ROOT / name).is_file()}
        TIMES.write_text(f"{json.dumps(kept | now, indent=1, sort_keys=True)}\n", "utf-8")


def _line(name: str, row: Sequence[float]) -> str:
    count, wall_s, cpu_s = row
    return f"| {name} | {count:.0f} | {wall_s:.1f} | {cpu_s:.1f} |"


def _cpu_s() -> float:
    own, children = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _kind(argv: Any) -> str:
    """What a command line starts, without what differs from one start to the next."""
    words = [argv] if isinstance(argv, str) else [str(word) for word in argv]
    name = words[0].rpartition("/")[2]
    if name.startswith("python") and "-m" in words:
        at = words.index("-m") + 1
        return " ".join(word for word in words[at : at + 2] if not word.startswith(("-", "/")))
    return name
