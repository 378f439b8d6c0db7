"""The operator's page: what it names exists, and its delivery table is the code's."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from shoal.core import delivery
from tests.test_tidy import sources

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
NAMED_TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))
METRICS = sorted(set(re.findall(r"`(shoal_(?:gateway|worker)_\w+)`", PAGE)))


def table(text: str) -> list[str]:
    """The rows of the delivery table in a text."""
    rows = text[text.index("| The attempt ended with") :].split("\n\n", maxsplit=1)[0]
    return [row.strip() for row in rows.splitlines()]


def test_operations_delivery_table_is_that_of_the_code():
    """The page and the module that decides have the same table."""
    assert table(PAGE) == table(delivery.__doc__)
    assert len(table(PAGE)) > 5


@pytest.mark.parametrize(("file", "name"), NAMED_TESTS)
def test_operations_names_tests_that_exist(file, name):
    """Every test that the page names is there."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_operations_names_metrics_that_exist():
    """Every metric that the page names is made somewhere, counters with `_total` behind."""
    made = {
        metric
        for source in sources()
        if source.path.startswith("src/")
        for metric in re.findall(r'"(shoal_(?:gateway|worker)_\w+)"', source.text)
    }
    assert METRICS
    assert {metric.removesuffix("_total") for metric in METRICS} <= made


def test_operations_speaks_of_every_kind_of_fault():
    """The page has a row or a test for each situation an operator may meet, at least so many."""
    situations = PAGE[PAGE.index("## Situations") : PAGE.index("## Delivery")]
    rows = [row for row in situations.splitlines() if row.startswith("| ")][1:]
    assert len(rows) >= 20
    assert all(row.count(" | ") >= 4 for row in rows)
    assert len(NAMED_TESTS) >= 15
