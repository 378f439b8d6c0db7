"""What a large catalog costs while nobody asks: starting, and idling.

    python bench/many_models.py [--quick] [--json FILE]

`shoal serve` with 20 and with 1,000 entries of the runtime `null`, by turns: the time until it is
ready, and the CPU time of all its processes together while it idles. Then the first request to a
model that has never been asked for, in the large catalog and in the small one.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import httpx
import psutil
from harness import Report, Server, median, options, serving

ENTRIES = (20, 1_000)
SETTLE_S = 5.0
_ENTRY = """\
id: m{n}
tasks: [encode]
source: file:///
runtime: "null"
outputs: {{dense: {{dim: 8}}}}
"""


def catalog(folder: Path, count: int) -> Path:
    """A folder with so many entries."""
    folder.mkdir()
    for n in range(count):
        (folder / f"m{n}.yaml").write_text(_ENTRY.format(n=n))
    return folder


def all_cpu_s(server: Server) -> float:
    """CPU seconds so far of all processes, the one that starts the others included."""
    return sum(server.cpu_s().values()) + sum(psutil.Process(server.process.pid).cpu_times()[:2])


def first_answer_s(server: Server, model: str) -> float:
    """Seconds of the first request to a model."""
    body = {"model": model, "inputs": ["a shoal of fish"]}
    begun_s = time.monotonic()
    answer = httpx.post(f"{server.url}/v1/encode", json=body, timeout=60.0)
    answer.raise_for_status()
    return time.monotonic() - begun_s


def main() -> None:
    """Measures both catalogs."""
    chosen = options(__doc__)
    rounds, idle_s = (1, 15.0) if chosen.quick else (3, 40.0)
    report = Report("What a large catalog costs")
    ready: dict[int, list[float]] = {count: [] for count in ENTRIES}
    idle: dict[int, list[float]] = {count: [] for count in ENTRIES}
    first: dict[int, list[float]] = {count: [] for count in ENTRIES}
    with tempfile.TemporaryDirectory() as name:
        folders = {count: catalog(Path(name) / str(count), count) for count in ENTRIES}
        for n in range(rounds):
            for count, folder in folders.items():
                begun_s = time.monotonic()
                with serving("--devices", "cpu:1", catalog=folder) as server:
                    ready[count].append(time.monotonic() - begun_s)
                    time.sleep(SETTLE_S)
                    before_s, at_s = all_cpu_s(server), time.monotonic()
                    time.sleep(idle_s)
                    used_s = all_cpu_s(server) - before_s
                    idle[count].append(100 * used_s / (time.monotonic() - at_s))
                    first_answer_s(server, "m0")  # the runtime's process has started by then
                    first[count].append(first_answer_s(server, f"m{n + 1}"))
    for count in ENTRIES:
        report.add(
            entries=count,
            ready_s=median(ready[count]),
            idle_core_percent=median(idle[count]),
            first_answer_s=median(first[count]),
        )
    few, many = ENTRIES
    report.headline["idle_core_percent_1000"] = median(idle[many])
    report.headline["ready_ratio_1000_over_20"] = median(ready[many]) / median(ready[few])
    report.headline["first_answer_ratio_1000_over_20"] = median(first[many]) / median(first[few])
    report.show()
    report.save(chosen)


if __name__ == "__main__":
    main()
