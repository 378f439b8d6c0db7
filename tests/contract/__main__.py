"""`make contract`: checks every runtime and writes what was found to `docs/runtimes.json`.

Exit status 0 only when every claim was checked or is declared unsupported; else nothing is
written. Owns that file; `python -m shoal.cli.docs` makes the page of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract.declared import PLANNED, RUNTIMES, UNSUPPORTED, runtime_of

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "docs" / "runtimes.json"
HELD = "held"
_ABOUT_MODELS = "model_elsewhere"


class Recorder:
    """A pytest plugin that keeps what became of each test."""

    def __init__(self) -> None:
        self.claims: dict[str, str] = {}
        self.runtimes: dict[str, dict[str, str]] = {name: {} for name in RUNTIMES}
        self.found: dict[str, dict[str, str]] = {name: {} for name in RUNTIMES}
        self.models: dict[str, dict[str, str]] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        """Notes a test that held."""
        report = (yield).get_result()
        runtime = runtime_of(item)
        if runtime is None or report.when != "call" or not report.passed:
            return
        noted = dict(item.user_properties)
        claim = item.originalname.removeprefix("test_contract_")
        if claim == _ABOUT_MODELS:
            self.models.setdefault(noted["model"], {})[runtime] = noted.get("refused", HELD)
            return
        self.claims[claim] = " ".join((item.function.__doc__ or "").split())
        self.found[runtime][claim] = HELD
        hosted = item.funcargs["hosted"]
        entry = hosted.subject.entry
        self.runtimes[runtime] = {"version": hosted.hello.version, "model": entry.id}

    def results(self) -> dict[str, Any]:
        """What the file has. Claims in the order of the tests, then those that are planned."""
        claims = self.claims | PLANNED
        found = {
            runtime: {claim: UNSUPPORTED[runtime].get(claim) or held[claim] for claim in claims}
            for runtime, held in self.found.items()
        }
        return {
            "claims": claims,
            "runtimes": self.runtimes,
            "found": found,
            "models": dict(sorted(self.models.items())),
        }


def main() -> int:
    """Runs the suite; returns the exit status."""
    recorder = Recorder()
    status = pytest.main([str(FOLDER), *sys.argv[1:]], plugins=[recorder])
    if status != 0:
        return int(status)
    text = json.dumps(recorder.results(), indent=2, ensure_ascii=False)
    RESULTS.write_text(f"{text}\n", encoding="utf-8")
    sys.stdout.write(f"wrote {RESULTS}: `make docs` makes the page\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
