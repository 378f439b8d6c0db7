"""The page on tasks names what the demo catalog serves, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from shoal.catalog.load import load

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tasks.md"
ROW = re.compile(r"^\| (\w+)(?:, (\w+))? \| `([^`]+)` \|", re.MULTILINE)


def test_docs_tasks_has_a_row_for_each_task_of_each_demo_model():
    """Every (model, task) has one, with an output that the model has; no row is of another."""
    entries = {entry.id: entry for entry in load(None).entries}
    rows = [(model, task, kind) for task, kind, model in ROW.findall(PAGE.read_text())]
    assert sorted((model, task) for model, task, _ in rows) == sorted(
        (entry.id, task) for entry in entries.values() for task in entry.tasks
    )
    for model, task, kind in rows:
        outputs = {"encode": [*entries[model].outputs], "extract": entries[model].extracts}
        assert kind in outputs.get(task, [""]), (model, task)
