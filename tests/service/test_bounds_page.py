"""docs/limits.md: its bounds are those of the code, its tests exist, and no bound is left out."""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest

from shoal.queue.interface import QueueLimits
from shoal.settings import ServeSettings
from tests.test_tidy import sources

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
ROWS = [row for row in PAGE.splitlines() if row.startswith("| ") and not row.startswith("| What")]
CONSTANTS = re.findall(r"`([a-z_.]+)\.(_?[A-Z_]+)` = (\d+)", PAGE)
LIMITS = re.findall(r"`QueueLimits\.(\w+)` = ([\d.]+)", PAGE)
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))
# Constants with such a name that bound no memory: sizes of pieces, and shares of time.
OTHERS = {
    ("core.turns", "MAX_DEBT_S"),
    ("gateway.ask", "MAX_TOKEN_ID"),
    ("gateway.forms", "MAX_HEADER_BYTES"),
    ("gateway.forms", "MAX_MESSAGE_CHARS"),
    ("gateway.server", "MAX_JOINED_BYTES"),
    ("client.shells", "MAX_CONNECTIONS"),
    ("queue.server", "MAX_PAYLOAD_BYTES"),
    ("runtimes.checkpoint", "MAX_HEADER_BYTES"),
    ("runtimes.torch_zip", "MAX_DEPTH"),
    ("runtimes.torch_zip", "MAX_PICKLE_BYTES"),
    ("runtimes.torch_zip", "MAX_STORAGE_BYTES"),
}


@pytest.mark.parametrize(("module", "name", "value"), CONSTANTS)
def test_limits_constant_is_that_of_the_code(module, name, value):
    """Every constant that the page names has the value it gives."""
    assert getattr(importlib.import_module(f"shoal.{module}"), name) == int(value)


def test_limits_of_the_queue_are_those_of_the_code():
    """Every bound of the queue's limits that the page names has the value it gives."""
    assert len(LIMITS) >= 4
    for name, value in LIMITS:
        assert getattr(QueueLimits(), name) == float(value)


def test_limits_settings_exist():
    """A bound that is one lower-case word is a setting of the command line."""
    known = {each.name for each in fields(ServeSettings)}
    named = {found for row in ROWS for found in re.findall(r"^\| [^|]+ \| `(\w+)` \|", row)}
    assert len(named) >= 15
    assert named <= known
    bounds = {name for name in known if name.startswith("max_")}
    assert bounds - {"max_attempts"} <= named


@pytest.mark.parametrize(("file", "name"), TESTS)
def test_limits_test_exists(file, name):
    """Every test that the page names is there."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_limits_every_row_has_a_test():
    """No row is a promise only."""
    assert len(ROWS) > 40
    assert [row for row in ROWS if "::test_" not in row] == []


def test_limits_no_constant_is_left_out():
    """Every public MAX_ constant of the product is on the page, or is known to bound no memory."""
    found = {
        (source.path.removeprefix("src/shoal/").removesuffix(".py").replace("/", "."), name)
        for source in sources()
        if source.path.startswith("src/shoal/")
        for name in re.findall(r"(?m)^(MAX_\w+)\b[^=\n]*=", source.text)
    }
    listed = {(module, name) for module, name, _ in CONSTANTS}
    assert found - listed - OTHERS == set()
    assert found >= OTHERS
