"""The agent of examples/contract_review, in a small form, against a server with the demo models."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from examples.contract_review import agent, findings
from examples.contract_review.__main__ import main
from examples.contract_review.documents import Contract, contracts
from examples.contract_review.findings import Findings, compare
from shoal.catalog.load import load
from shoal.cli.plan import read_trace
from shoal.client import Entity
from tests.support.pace import limit_s
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = 2
SEED = 0
MODELS = {step.model for step in agent.STEPS if step.model}


@dataclass
class Run:
    """One run of the program: what it drew, and what it printed and wrote."""

    drawn: list[Contract]
    printed: str
    svg: Path
    workload: Path

    def block(self, contract: Contract) -> str:
        """What it said of a contract."""
        return next(b for b in self.printed.split("\n\n") if b.startswith(contract.name))


@pytest.fixture(scope="module")
def run(live_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("review")
    svg, workload = folder / "timeline.svg", folder / "workload.jsonl"
    command = [sys.executable, "-W", "error", "-m", "examples.contract_review"]
    command += ["--url", live_server, "--documents", str(DOCUMENTS), "--seed", str(SEED)]
    command += ["--check", "--svg", str(svg), "--record", str(workload)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit_s(110)
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return Run(contracts(DOCUMENTS, SEED), done.stdout, svg, workload)


@pytest.mark.slow
def test_agent_finds_what_was_drawn(run):
    """Of a picture and a PDF it says the personal data, the risky clauses and the instruction."""
    assert {one.kind for one in run.drawn} == {"png", "pdf"}
    assert any(one.risky for one in run.drawn)
    assert {one.injected for one in run.drawn} == {True, False}
    for contract in run.drawn:
        said = run.block(contract)
        assert f"({contract.kind}" in said
        assert set(re.findall("like `(.*)`", said)) == contract.risky
        assert ("instructs its reader" in said) == contract.injected
        letters = "".join(said.split())  # OCR may lose a space
        assert {one for one in contract.pii if "".join(one.split()) not in letters} == set()


@pytest.mark.slow
def test_agent_has_its_summary_from_a_generator(run):
    """Under each contract stands what the generator made of the notes, naming both parties."""
    for contract in run.drawn:
        (said,) = re.findall("summary: (.+)", run.block(contract))
        assert "Notes:" not in said
        assert sum(party in said for party in contract.parties) >= 1, said
    assert agent.GENERATOR in run.printed


@pytest.mark.slow
def test_agent_asks_at_least_nine_models_and_draws_them(run):
    """Each step's model is in the timeline as text, in the SVG and in the workload file."""
    assert len(MODELS) >= 9
    assert {line.split()[0] for line in run.printed.split("\n") if line.endswith("calls")} == MODELS
    root = ET.parse(run.svg).getroot()  # noqa: S314 - written a moment ago
    space = "{http://www.w3.org/2000/svg}"
    assert {text.text for text in root.findall(f"{space}text")} >= MODELS
    bars = root.findall(f"{space}rect/{space}title")
    calls = read_trace(run.workload, load(None))
    assert len(bars) == len(calls)
    assert {call.model for call in calls} == MODELS


def test_agent_says_that_no_server_answers(capsys):
    """Without a server it ends with a status and a sentence, not with a traceback."""
    assert main(["--url", f"http://127.0.0.1:{free_port()}", "--documents", "1"]) == 1
    assert "no answer" in capsys.readouterr().out


def test_agent_asks_the_server_of_the_environment(capsys, monkeypatch):
    """Without --url it is the one that `shoal run` would ask."""
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("SHOAL_URL", url)
    assert main(["--documents", "1"]) == 1
    assert url in capsys.readouterr().out


def test_agent_joins_the_pieces_of_a_name_and_of_an_address():
    """Pieces with at most a character between them are one; two people are two."""
    text = "Ada King, m.lee@x.com, Joe"
    places = [("GIVEN_NAME", 0, 3), ("SURNAME", 4, 8), ("EMAIL", 10, 11), ("EMAIL", 12, 21)]
    places.append(("GIVEN_NAME", 23, 26))
    entities = [Entity(label, text[start:end], start, end, 1.0) for label, start, end in places]
    found = findings.personal_data(text, entities)
    assert found == [("name", "Ada King"), ("e-mail", "m.lee@x.com"), ("name", "Joe")]


def test_agent_check_counts_what_is_wrong_and_what_is_missed():
    """One of two findings that is wrong halves the precision, one that is missed the recall."""
    contract = next(one for one in contracts(3, SEED) if one.kind == "txt")
    known = sorted(contract.pii)
    half = Findings(contract.name, pii=[("name", one) for one in known[: len(known) // 2]])
    quality = compare([(contract, half)])["personal data"]
    assert (quality.precision, quality.recall) == (1.0, 0.5)
    half.pii += [("name", f"not {one}") for one in known[: len(known) // 2]]
    quality = compare([(contract, half)])["personal data"]
    assert (quality.precision, quality.recall) == (0.5, 0.5)
