"""Part 1: each model on each of its runtimes, one after the other.

The measuring is that of `shoal models bakeoff`, whose numbers are read as JSON. Owns the choice of
models and the table's rows.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from harness import Report
from measure.figures import copies_in

from runtime_cases.places import DATA, environment_bytes, why_not
from shoal.catalog.load import load
from shoal.catalog.schema import Entry
from shoal.catalog.variants import runtimes_of

MIB = 2**20
ROOM_MIB = 24 * 1024
ENCODER, ENCODERS = "all-minilm-l6-v2", ("onnx", "torch", "candle", "sglang")
SMALLER = "all-minilm-l6-v2-int8"
SECONDS, QUICK_SECONDS = 3.0, 0.3


def run(report: Report, *, quick: bool) -> None:
    """Part 1."""
    seconds = QUICK_SECONDS if quick else SECONDS
    catalog = load(None)
    encoder = catalog.resolve(ENCODER)
    measured = _bakeoff(encoder, ENCODERS, seconds) + _bakeoff(
        catalog.resolve(SMALLER), ("onnx",), seconds
    )
    for entry, row in measured:
        found = _found(row, "uniform_tokens_per_s", "ragged_tokens_per_s", "cosine")
        report.add(**{"1. model": entry.id}, **_row(entry, row), **found)
        if entry.id == ENCODER and row["runtime"] in ("torch", "candle"):
            report.headline[f"{row['runtime']}_first_answer_s"] = row["first_answer_s"]
    for generator in (each for each in catalog.entries if each.generates):
        for entry, row in _bakeoff(generator, runtimes_of(generator), seconds):
            rates = {f"at {n} tok/s": rate for n, rate in row["found"]["tokens_per_s"].items()}
            found = _found(row, "slots", "first_token_s")
            report.add(**{"1. generator": entry.id}, **_row(entry, row), **found, **rates)


def _bakeoff(
    entry: Entry, runtimes: tuple[str, ...] | list[str], seconds: float
) -> list[tuple[Entry, dict[str, Any]]]:
    """The rows of the runtimes that ran; why the others did not is printed."""
    taking_part = []
    for runtime in runtimes:
        if reason := why_not(runtime):
            print(f"left out: {entry.id} on {runtime}: {reason}", flush=True)
        else:
            taking_part.append(runtime)
    if not taking_part:
        return []
    done = subprocess.run(
        [
            *(sys.executable, "-m", "shoal", "models", "bakeoff", entry.id, "--json"),
            *("--runtimes", ",".join(taking_part), "--seconds", str(seconds)),
            *("--data-dir", str(DATA)),
        ],
        stdout=subprocess.PIPE,
        check=False,
    )
    rows = json.loads(done.stdout or "[]")
    for row in rows:
        if row["why_not"]:
            print(f"left out: {entry.id} on {row['runtime']}: {row['why_not']}", flush=True)
    return [(entry, row) for row in rows if row["found"]]


def _row(entry: Entry, row: dict[str, Any]) -> dict[str, Any]:
    model_mib, process_mib = row["model_bytes"] / MIB, row["process_bytes"] / MIB
    return {
        "runtime": f"{row['runtime']} {row['version']}",
        "env MiB": environment_bytes(row["runtime"]) / MIB,
        "starts": row["starts"],
        "start s": row["start_s"],
        "load s": row["load_s"],
        "first answer s": row["first_answer_s"],
        "model MiB": model_mib,
        "process MiB": process_mib,
        "in 24 GiB": copies_in(ROOM_MIB, process_mib, model_mib, of_one=entry.generates),
    }


def _found(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name.replace("_per_s", "/s").replace("_", " "): row["found"][name] for name in names}
