"""`make contract`: checks every runtime and writes what was found to `docs/runtimes.json`.

Exit status 0 only when every claim was checked or is declared unsupported; else nothing is
written. What was not run (`-k` chose something else, or an engine is not built here) keeps its
earlier result. Owns that file; `python -m shoal.cli.docs` makes the page of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract.declared import (
    FIXTURES,
    GROUPS,
    OPTIONAL,
    RUNTIMES,
    UNSUPPORTED,
    about,
    claim_of,
)

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "docs" / "runtimes.json"
HELD = "held"
_ABOUT_MODELS = "model_elsewhere"


class Recorder:
    """A pytest plugin that keeps what became of each test."""

    def __init__(self) -> None:
        self.claims: dict[str, dict[str, str]] = {group: {} for group in GROUPS}
        self.lines: dict[str, int] = {}
        self.runtimes: dict[str, dict[str, str]] = {name: {} for name in RUNTIMES}
        self.found: dict[tuple[str, str, str], str] = {}
        self.left_out: dict[tuple[str, str, str], str] = {}
        self.models: dict[str, dict[str, str]] = {}
        self.elsewhere: set[tuple[str, str]] = set()

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Notes what there is to claim, whether it is chosen to run or not."""
        tested = about(item)
        if tested is None:
            return
        group, runtime = tested
        claim = claim_of(item.originalname)
        if claim == _ABOUT_MODELS:
            self.elsewhere.add((item.callspec.params["model"], runtime))
            return
        self.claims[group][claim] = " ".join((item.function.__doc__ or "").split())
        self.lines[claim] = item.function.__code__.co_firstlineno

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        """Notes a test that held, or was skipped where that may be."""
        report = (yield).get_result()
        tested = about(item)
        if tested is None:
            return
        group, runtime = tested
        claim = claim_of(item.originalname)
        if report.skipped and runtime in OPTIONAL:
            why = report.longrepr[2].removeprefix("Skipped: ")
            self.left_out[group, runtime, claim] = f"not run here: {why}"
        if report.when != "call" or not report.passed:
            return
        noted = dict(item.user_properties)
        if claim == _ABOUT_MODELS:
            self.models.setdefault(noted["model"], {})[runtime] = noted.get("refused", HELD)
            return
        self.found[group, runtime, claim] = HELD
        running = next(item.funcargs[name] for name in FIXTURES if name in item.funcargs)
        self.runtimes[runtime]["version"] = running.hello.version
        self.runtimes[runtime][group] = running.subject.entry.id

    def results(self, earlier: dict[str, Any]) -> dict[str, Any]:
        """What the file has; the claims of each group in the order of the tests.

        earlier: what it had before. Raises `KeyError` for what was never run.
        """
        models = earlier.get("models", {})
        for model, runtime in self.elsewhere:
            found = self.models.setdefault(model, {})
            if runtime not in found:
                found[runtime] = models[model][runtime]
        return {
            "groups": {
                group: {
                    "claims": {claim: self.claims[group][claim] for claim in self._order(group)},
                    "found": {name: self._of(group, name, earlier) for name in names},
                }
                for group, names in GROUPS.items()
            },
            "runtimes": {
                name: earlier.get("runtimes", {}).get(name, {}) | about
                for name, about in self.runtimes.items()
            },
            "models": {name: self.models[name] for name in sorted(self.models)},
        }

    def _of(self, group: str, runtime: str, earlier: dict[str, Any]) -> dict[str, str]:
        declared = UNSUPPORTED[group][runtime]
        before = earlier.get("groups", {}).get(group, {}).get("found", {}).get(runtime, {})
        results = {}
        for claim in self._order(group):
            key = (group, runtime, claim)
            now = declared.get(claim) or self.found.get(key)
            results[claim] = now or before.get(claim) or self.left_out[key]
        return results

    def _order(self, group: str) -> list[str]:
        return sorted(self.claims[group], key=lambda claim: self.lines[claim])


def main() -> int:
    """Runs the suite; returns the exit status."""
    recorder = Recorder()
    status = pytest.main([str(FOLDER), *sys.argv[1:]], plugins=[recorder])
    if status != 0:
        return int(status)
    earlier = json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else {}
    text = json.dumps(recorder.results(earlier), indent=2, ensure_ascii=False)
    RESULTS.write_text(f"{text}\n", encoding="utf-8")
    sys.stdout.write(f"wrote {RESULTS}: `make docs` makes the page\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
