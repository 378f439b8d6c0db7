"""The page on runtimes and its results: every runtime and every claim of the contract suite."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest

from shoal.catalog.load import load
from shoal.cli.docs import pages
from shoal.cli.docs_runtimes import PAGE, RESULTS
from shoal.runtimes.registry import names
from tests.contract.declared import GROUPS, OPTIONAL, RUNTIMES, UNSUPPORTED, claim_of

ROOT = Path(__file__).resolve().parents[2]
FOUND = json.loads((ROOT / "docs" / RESULTS).read_text(encoding="utf-8"))
MODULES = {
    "batches": "test_contract",
    "generation": "test_contract_generation",
    "adapters": "test_contract_adapters",
}


@cache
def made() -> str:
    """The page as it would be written now."""
    return pages(ROOT / "docs")[PAGE]


def _claims(group: str) -> dict[str, str]:
    """The claims of a group, in the words of its tests."""
    text = (ROOT / "tests" / "contract" / f"{MODULES[group]}.py").read_text(encoding="utf-8")
    return {
        claim_of(node.name): " ".join((ast.get_docstring(node) or "").split())
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_contract_")
    }


def test_docs_runtimes_has_every_registered_runtime():
    """Each runtime that can be named in a catalog is in the suite, in its results and the page."""
    page = made()
    assert set(names()) <= set(RUNTIMES) == set(FOUND["runtimes"])
    assert {name: tuple(group["found"]) for name, group in FOUND["groups"].items()} == GROUPS
    assert all(f"`{name}`" in page for name in RUNTIMES)


@pytest.mark.parametrize("group", GROUPS)
def test_docs_runtimes_results_are_those_of_the_suite(group):
    """Each claim of the suite, in its own words, held or declared with the very same reason."""
    written = FOUND["groups"][group]
    assert written["claims"] == _claims(group)
    for runtime, held in written["found"].items():
        assert list(held) == list(written["claims"])
        other = {claim: why for claim, why in held.items() if why != "held"}
        if runtime in OPTIONAL:
            other = {claim: why for claim, why in other.items() if "not run here" not in why}
            assert other.items() <= UNSUPPORTED[group][runtime].items()
        else:
            assert other == UNSUPPORTED[group][runtime]


@pytest.mark.parametrize("group", GROUPS)
def test_docs_runtimes_page_has_a_cell_for_each_claim_and_runtime(group):
    """The table says yes where a claim held and nothing else; no path of a machine is in it."""
    page, written = made(), FOUND["groups"][group]
    for claim in written["claims"]:
        (row,) = re.findall(rf"^\| `{claim}` \| ((?:(?:yes|-|\?) \|? ?)+)$", page, re.MULTILINE)
        cells = [cell.strip() for cell in row.strip(" |").split("|")]
        held = [found[claim] == "held" for found in written["found"].values()]
        assert [cell == "yes" for cell in cells] == held
    assert "site-packages" not in page


def test_docs_runtimes_models_are_of_the_demo_catalog():
    """No row is left of a model that is gone."""
    assert FOUND["models"]
    assert set(FOUND["models"]) <= {entry.id for entry in load(None).entries}
