"""The page on runtimes and its results: every runtime and every claim of the contract suite."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from shoal.catalog.load import load
from shoal.cli.docs import pages
from shoal.cli.docs_runtimes import PAGE, RESULTS
from shoal.runtimes.registry import names
from tests.contract.declared import PLANNED, RUNTIMES, UNSUPPORTED

ROOT = Path(__file__).resolve().parents[2]
FOUND = json.loads((ROOT / "docs" / RESULTS).read_text(encoding="utf-8"))
SUITE = ast.parse((ROOT / "tests" / "contract" / "test_contract.py").read_text(encoding="utf-8"))
CLAIMS = {
    node.name.removeprefix("test_contract_"): " ".join((ast.get_docstring(node) or "").split())
    for node in SUITE.body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_contract_")
}


def test_docs_runtimes_has_every_registered_runtime():
    """Each runtime that can be named in a catalog is in the suite, in its results and the page."""
    page = pages(ROOT / "docs")[PAGE]
    assert set(names()) <= set(RUNTIMES) == set(FOUND["found"]) == set(FOUND["runtimes"])
    assert all(f"`{name}`" in page for name in RUNTIMES)


def test_docs_runtimes_results_are_those_of_the_suite():
    """Each claim of the suite, in its own words, held or declared with the very same reason."""
    assert FOUND["claims"] == CLAIMS | PLANNED
    for runtime, held in FOUND["found"].items():
        assert list(held) == list(FOUND["claims"])
        declared = {claim: why for claim, why in held.items() if why != "held"}
        assert declared == UNSUPPORTED[runtime]


def test_docs_runtimes_page_has_a_cell_for_each_claim_and_runtime():
    """The table says yes where a claim held and nothing else; no path of a machine is in it."""
    page = pages(ROOT / "docs")[PAGE]
    for claim in FOUND["claims"]:
        (row,) = re.findall(rf"^\| `{claim}` \| ((?:(?:yes|-) \|? ?)+)$", page, re.MULTILINE)
        cells = [cell.strip() for cell in row.strip(" |").split("|")]
        held = [found[claim] == "held" for found in FOUND["found"].values()]
        assert [cell == "yes" for cell in cells] == held
    assert "site-packages" not in page


def test_docs_runtimes_models_are_of_the_demo_catalog():
    """No row is left of a model that is gone."""
    assert FOUND["models"]
    assert set(FOUND["models"]) <= {entry.id for entry in load(None).entries}
