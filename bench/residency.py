"""A fleet on one device: what loads cost, what stays loaded, and how soon a new model serves.

Part 1 loads every demo model in a runtime process of its own: cold, and again after an eviction.
Part 2 plays a trace of drifting popularity over twenty models against memory for six, once for each
policy, and simulates the same trace with the planner. Part 3 loads and unloads one model fifty
times. Part 4 adds a model to a running server.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from fleet.cycles import measure
from fleet.drift import MIB, ROOM, Played, favourites, names, play, simulate, trace, write_catalog
from harness import Report, median, options
from measure.figures import quantile
from measure.servers import Watched, watched

from shoal.catalog.load import load
from shoal.catalog.resolve import why_absent
from shoal.cli.plan import read_measured
from shoal.runtimes.registry import available

PARTS = 4
CYCLES = 50
SETTLED_CYCLE = 5
ROOMY_MIB = 16_384


@dataclass(frozen=True, slots=True)
class Trial:
    """The traffic of part 2. The policies that are not compared by a ratio play the first seed."""

    rate: float
    minutes: float
    seeds: int


FULL = Trial(rate=6.0, minutes=1.0, seeds=2)
QUICK = Trial(rate=8.0, minutes=0.2, seeds=1)


def load_times(report: Report, *, quick: bool) -> None:
    """Part 1."""
    for entry in load(None).entries:
        if available(entry.runtime) is not None or why_absent(entry) is not None:
            continue
        if quick and entry.runtime != "onnx":
            continue
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            found = measure(entry, Path(folder), 3)
        report.add(
            model=entry.id,
            runtime=entry.runtime,
            process_start_s=found.start_s,
            load_s=found.cold_s,
            reload_s=median(found.warm_s),
            reload_over_load=median(found.warm_s) / found.cold_s,
            mib=found.model_bytes / MIB,
        )


def _sizes(folder: Path) -> tuple[int, int]:
    """The mean size of the twenty models, and what a runtime process takes beside its models."""
    with watched(
        *("--devices", "cpu:1", "--memory-mib", str(ROOMY_MIB)), catalog=write_catalog(folder)
    ) as server:
        with httpx.Client(base_url=server.url, timeout=120) as http:
            for model in names():
                http.post("/v1/encode", json={"model": model, "inputs": ["a shoal of fish"]})
        held_bytes = sum(p.memory_info().rss for p in server.server.parts()["runtime"])
        server.server.process.terminate()  # what was measured is written down at the end
        server.server.process.wait(30)
        sizes = [one.size_bytes for one in read_measured(_memory_file(server)).values()]
    return sum(sizes) // len(sizes), held_bytes - sum(sizes)


def _memory_file(server: Watched) -> Path:
    return server.server.folder / "cache" / "memory.json"


def compare(report: Report, trial: Trial) -> None:
    """Part 2."""
    ratios: list[float] = []
    errors: list[float] = []
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        folder = Path(name)
        mean_bytes, beside_bytes = _sizes(folder / "sizes")
        room_bytes = ROOM * mean_bytes
        budget_mib = (room_bytes + max(0, beside_bytes)) // MIB
        for seed in range(trial.seeds):
            arrivals = trace(seed, rate=trial.rate, minutes=trial.minutes)
            played: dict[str, Played] = {}
            for policy in ("lru", "density") if seed else ("lru", "pin", "gdsf", "density"):
                pinned = favourites(arrivals) if policy == "pin" else []
                catalog = write_catalog(folder / f"{policy}-{seed}", pinned)
                ranking = "lru" if policy == "pin" else policy
                flags = ("--devices", "cpu:1", "--memory-mib", str(budget_mib))
                with watched(*flags, "--residency", ranking, catalog=catalog) as server:
                    played[policy] = play(server, arrivals)
                    server.server.process.terminate()
                    server.server.process.wait(30)
                    planned = simulate(arrivals, ranking, room_bytes, _memory_file(server))
                _row(report, seed, policy, played[policy], planned)
                if policy == "density":
                    errors.append(abs(planned / played[policy].load_s_per_1000 - 1.0))
            ratios.append(played["density"].load_s / played["lru"].load_s)
    report.headline["load_seconds_ratio_vs_lru"] = median(ratios)
    report.headline["plan_error"] = median(errors)


def _row(report: Report, seed: int, policy: str, played: Played, planned: float) -> None:
    report.add(
        seed=seed,
        policy=policy,
        requests=played.requests,
        failed=played.failed,
        loads=played.loads,
        load_s_per_1000=played.load_s_per_1000,
        planned_load_s_per_1000="" if policy == "pin" else planned,
        cold_share=len(played.cold_s) / max(1, len(played.latencies_s)),
        p50_s=quantile(played.latencies_s, 0.5),
        cold_p95_s=played.cold_p95_s(),
        busy=played.run_s / played.took_s,
    )


def plateau(report: Report) -> None:
    """Part 3."""
    growth: list[float] = []
    for name in ("all-minilm-l6-v2", "all-minilm-l6-v2-int8", "all-minilm-l6-v2-torch"):
        entry = load(None).resolve(name)
        if available(entry.runtime) is not None:
            continue
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            held = [size / MIB for size in measure(entry, Path(folder), CYCLES).held_bytes]
        growth.append(held[-1] / held[SETTLED_CYCLE - 1] - 1.0)
        report.add(
            cycles_of=entry.id,
            mib_after_1=held[0],
            mib_after_5=held[4],
            mib_after_10=held[9],
            mib_after_50=held[-1],
        )
    report.headline["memory_growth_50_cycles"] = max(growth)


def add_a_model(report: Report, tries: int) -> None:
    """Part 4: from the command's start to the first answer of the model that it adds."""
    with _empty() as server:
        took = [_add(server.server.folder, server.url, f"tuned-{n}") for n in range(tries)]
    report.add(added="a fine-tune of MiniLM", tries=tries, command_s=median([a for a, _ in took]))
    report.headline["add_to_first_answer_s"] = median([b for _, b in took])


@contextmanager
def _empty() -> Iterator[Watched]:
    with watched("--devices", "cpu:1", catalog=Path(_builtin())) as server:
        httpx.post(
            f"{server.url}/v1/encode",
            json={"model": "all-minilm-l6-v2", "inputs": ["warm"]},
            timeout=60,
        )
        yield server


def _builtin() -> Path:
    from shoal.catalog.load import BUILTIN

    return BUILTIN


def _add(data_dir: Path, url: str, model: str) -> tuple[float, float]:
    """Seconds that the command took, and seconds from its start to the first answer."""
    command = [
        *(sys.executable, "-m", "shoal", "models", "add", model, "--data-dir", str(data_dir)),
        *("--source", "package://sre_embedding_model/model_weights"),
        *("--like", "all-minilm-l6-v2"),
    ]
    begun_s = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    command_s = time.monotonic() - begun_s
    with httpx.Client(base_url=url, timeout=60) as http:
        while True:
            body = {"model": model, "inputs": ["mean time to recover"]}
            answer = http.post("/v1/encode", json=body)
            if answer.status_code == 200:
                return command_s, time.monotonic() - begun_s
            if time.monotonic() - begun_s > 60:
                raise SystemExit(f"{model} does not answer: {answer.text}")
            time.sleep(0.02)


def main() -> None:
    """Runs the parts that were asked for."""
    chosen = options(__doc__, PARTS)
    parts = chosen.part or range(1, PARTS + 1)
    report = Report("a fleet on one device")
    if 1 in parts:
        load_times(report, quick=chosen.quick)
    if 2 in parts:
        compare(report, QUICK if chosen.quick else FULL)
    if 3 in parts:
        plateau(report)
    if 4 in parts:
        add_a_model(report, 1 if chosen.quick else 5)
    report.finish(chosen)


if __name__ == "__main__":
    main()
