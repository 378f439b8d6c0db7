"""`shoal plan`: its inputs, its tables and its picture."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from shoal.catalog.load import load
from shoal.cli.main import app
from shoal.cli.plan import MIB, models_of, read_measured, read_trace
from shoal.errors import SettingsError
from shoal.sim.workload import Arrival

ENTRY = """\
id: {name}
tasks: [encode]
source: file:///weights
outputs: {{dense: {{dim: 4}}}}
memory_mib: {mib}
"""


@pytest.fixture
def catalog(tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    for name, mib in (("a", 100), ("b", 100), ("c", 100), ("huge", 5000)):
        (folder / f"{name}.yaml").write_text(ENTRY.format(name=name, mib=mib))
    return folder


def invoke(*arguments):
    return CliRunner().invoke(app, ["plan", *(str(each) for each in arguments)])


def test_plan_prints_what_stays_and_what_more_would_buy(catalog, tmp_path):
    """One table of models and one of sums, with another GiB beside; a picture as SVG."""
    trace = tmp_path / "trace.csv"
    rows = [f"{n * 5},{'abacb'[n % 5]}" for n in range(60)] + ["400,huge"]
    trace.write_text("\n".join(["time_s,model", *rows]))
    svg = tmp_path / "p.svg"
    done = invoke("--catalog", catalog, "--memory-mib", 200, "--trace", trace, "--picture", svg)
    assert done.exit_code == 0, done.output
    lines = {line.split("  ")[0]: line.split() for line in done.output.splitlines()}
    assert lines["huge"][-1] == "never"
    assert int(lines["a"][-2]) < int(lines["c"][-2])  # loads
    now, more = map(float, lines["load seconds per 1,000 requests"][-2:])
    assert more < now
    bars = svg.read_text().count("<title>")
    assert bars == sum(int(lines[model][-2]) for model in "abc")


def test_plan_compares_all_policies(catalog):
    """--compare has one row for each policy, from a trace that is made up."""
    more = ("--rate", 1, "--minutes", 1, "--devices", 2, "--compare")
    done = invoke("--catalog", catalog, "--memory-mib", 200, *more)
    assert done.exit_code == 0, done.output
    names = [line.split()[0] for line in done.output.splitlines()[2:]]
    assert names == ["density", "lru", "pin", "gdsf", "clairvoyant"]


def test_plan_reads_json_lines_in_order_of_time(catalog, tmp_path):
    """JSON lines are a trace, too; names may be aliases or have a revision."""
    trace = tmp_path / "trace.jsonl"
    rows = [{"time_s": 2, "model": "b@1"}, {"time_s": 1.5, "model": "a"}]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    assert read_trace(trace, load(catalog)) == [Arrival(1.5, "a"), Arrival(2.0, "b")]


@pytest.mark.parametrize("text", ["time_s\n1\n", "time_s,model\nx,a\n", "model\na\n"])
def test_plan_names_the_request_that_is_wrong(catalog, tmp_path, text):
    """A trace that cannot be read is the operator's fault and says where."""
    trace = tmp_path / "trace.csv"
    trace.write_text(text)
    with pytest.raises(SettingsError, match="request 1"):
        read_trace(trace, load(catalog))


def test_plan_believes_measured_sizes(catalog, tmp_path):
    """A worker's measured file wins over the entries' estimates; the largest of several counts."""
    file = tmp_path / "memory.json"
    sizes = {"a@1 onnx cpux1": (MIB, 0.5), "a@1 onnx cpux2": (2 * MIB, 0.7)}
    file.write_text(json.dumps({k: {"size_bytes": b, "load_s": s} for k, (b, s) in sizes.items()}))
    a, b, *_ = models_of(load(catalog).entries, read_measured(file))
    assert (a.size_bytes, a.load_s) == (2 * MIB, 0.7)
    assert b.size_bytes == 100 * MIB
    file.write_text("[]")
    with pytest.raises(SettingsError):
        read_measured(file)


def test_plan_bounds_the_requests_of_a_trace(catalog, tmp_path, monkeypatch):
    """More requests than the bound are refused, made up or read."""
    monkeypatch.setattr("shoal.cli.plan.MAX_REQUESTS", 3)
    trace = tmp_path / "trace.csv"
    trace.write_text("time_s,model\n" + "1,a\n" * 4)
    with pytest.raises(SettingsError, match="more than 3 requests"):
        read_trace(trace, load(catalog))
    done = invoke("--catalog", catalog, "--memory-mib", 200)
    assert isinstance(done.exception, SettingsError)
