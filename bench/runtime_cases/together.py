"""Part 4: one gateway, and behind it a real model of each runtime that is installed.

Owns the catalog, an entry for each runtime and kind of work, and one call to each.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import uvloop
import yaml
from harness import Report, Server, serving
from measure.load import saturate
from msgspec import structs
from task_cases.cases import case

from runtime_cases.places import CACHE, why_not
from shoal.catalog.change import plain_entry
from shoal.catalog.load import load
from shoal.catalog.schema import Entry
from shoal.catalog.variants import on_runtime, runtimes_of
from shoal.errors import RuntimeUnavailable
from shoal.runtimes.registry import names

LOAD_S = 300.0


def run(report: Report, *, quick: bool) -> None:
    """Part 4. It is as quick as it can be."""
    del quick
    chosen = list(_one_of_each())
    with tempfile.TemporaryDirectory() as folder:
        catalog = Path(folder)
        for entry in chosen:
            (catalog / f"{entry.id}.yaml").write_text(yaml.safe_dump(plain_entry(entry)))
        with serving("--cache-dir", str(CACHE), catalog=catalog) as server:
            for entry in chosen:
                begun_s = time.monotonic()
                fault = _ask(server, entry)
                report.add(
                    **{
                        "4. runtime": entry.runtime,
                        "model": entry.id,
                        "task": entry.tasks[0],
                        "answered": fault or "yes",
                        "cold answer s": time.monotonic() - begun_s,
                    }
                )
    report.headline["runtimes_proven"] = len(proven(report.rows))


def proven(rows: Sequence[Mapping[str, object]]) -> set[str]:
    """The runtimes that answered all that they were asked."""
    failed = {str(row["4. runtime"]) for row in rows if row["answered"] != "yes"}
    return {str(row["4. runtime"]) for row in rows} - failed


def _one_of_each() -> Iterator[Entry]:
    """An entry for each runtime, and one more for a runtime that generates besides."""
    entries = load(None).entries
    for runtime in (name for name in names() if name != "null"):
        try:
            reason = why_not(runtime)
        except RuntimeUnavailable as error:
            reason = error.message
        if reason is not None:
            print(f"left out: {runtime}: {reason}", flush=True)
            continue
        named = [entry for entry in entries if runtime in runtimes_of(entry)]
        named.sort(key=lambda entry: entry.runtime != runtime)
        for generates in (False, True):
            for entry in [each for each in named if each.generates == generates][:1]:
                alone = on_runtime(entry, runtime)
                yield structs.replace(
                    alone, id=f"{entry.id}-by-{runtime}", aliases=[], pinned=False
                )


def fault_of(answer: httpx.Response) -> str | None:
    """What is wrong with an answer of `/v1/generate`; None where it has a text."""
    if answer.status_code != 200:
        return answer.text[:200]
    texts = [one["text"] for one in answer.json()["data"]]
    return None if texts and all(text.strip() for text in texts) else "it said nothing"


def _ask(server: Server, entry: Entry) -> str | None:
    """One call for the first task; what went wrong, or None."""
    headers = {"x-shoal-deadline-ms": str(int(1e3 * LOAD_S))}
    if entry.generates:
        body = {"model": entry.id, "inputs": "The capital of France is", "max_tokens": 8}
        answer = httpx.post(f"{server.url}/v1/generate", json=body, headers=headers, timeout=LOAD_S)
        return fault_of(answer)
    one = case(entry, entry.tasks[0])
    if one is None:
        return "its inputs are not installed"
    try:
        patient = f"\r\nx-shoal-deadline-ms: {int(1e3 * LOAD_S)}\r\n".encode()
        request = one.alone(server.url)[0].replace(b"\r\n", patient, 1)
        calls = uvloop.run(saturate(server.url, [request], 1, 0.0, 1))
    except SystemExit as error:
        return str(error)
    return None if calls else "no call was made"
