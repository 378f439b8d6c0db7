"""Part 1: who forms the best batches of ragged texts while every window is full.

Each policy runs the whole way: HTTP, queue, worker, runtime. The baselines get the room that they
need (the worker pulls for them as if a pass had 8,192 tokens, so that 64 texts are always here) and
on torch they pad, as they would elsewhere.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from harness import Report, median
from measure.figures import quantile, ratio_interval, steady_rate
from measure.load import saturate
from measure.rounds import rotated, rounds
from measure.servers import Watched, several
from measure.traffic import lengths, request, text, write_catalog

MODEL = "ragged"
TEXTS = 2048
BASELINES = ("fifo32", "window64", "buckets")
BASELINE_BLOCK_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the policies are compared. variants: flags by name, `fair` among them.

    rounds: how many at most; budget_s: the time that all of them may take.
    """

    name: str
    runtime: str
    cores: int
    variants: dict[str, tuple[str, ...]]
    rounds: int
    budget_s: float
    clients_per_device: int = 128  # 64 run, 64 are staged: so the hungriest baseline is full

    @property
    def clients(self) -> int:
        """Calls that are always open."""
        return self.clients_per_device * self.cores


@dataclass(slots=True)
class Trial:
    """One policy in one round. busy: the share of the time that the devices computed.

    tokens_per_cpu_s: useful tokens over the CPU time of the runtimes; other programs on the machine
    disturb it less than the rate.
    """

    tokens_per_s: float
    tokens_per_cpu_s: float
    waste: float
    batch_items: float
    busy: float
    latencies_s: list[float] = field(default_factory=list)


def _policies(devices: int, names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {name: ("--policy", name, "--devices", f"cpu:{devices}") for name in names}


def layouts(*, quick: bool) -> list[Layout]:
    """All of them, or the first in a rough form."""
    names = (*BASELINES, "fair")
    if quick:
        return [Layout("onnx, 1 device", "onnx", 1, _policies(1, names), 1, 0.0, 96)]
    threads = {"fair, 1 process of 2 threads": ("--devices", "cpu:1", "--threads", "2")}
    return [
        Layout("onnx, 1 device", "onnx", 1, _policies(1, names), 4, 80.0),
        Layout("onnx, 2 devices", "onnx", 2, threads | _policies(2, names), 3, 60.0),
        Layout("torch, 1 device", "torch", 1, _policies(1, names), 2, 40.0),
        Layout("torch, 2 devices", "torch", 2, _policies(2, names), 2, 40.0),
    ]


def _starts(folder: Path, layout: Layout) -> dict[str, tuple[tuple[str, ...], Path]]:
    starts = {}
    for n, (name, flags) in enumerate(layout.variants.items()):
        plain = name in BASELINES
        catalog = write_catalog(
            folder / str(n),
            [MODEL],
            runtime=layout.runtime,
            block_tokens=BASELINE_BLOCK_TOKENS if plain else 1024,
            packing=False if plain and layout.runtime == "torch" else None,
        )
        starts[name] = (flags, catalog)
    return starts


def trial(server: Watched, seed: int, concurrency: int, least_s: float, least_calls: int) -> Trial:
    """One policy on the texts of one seed."""
    sizes, rng = lengths(TEXTS, seed), random.Random(seed)
    requests = [request(server.url, MODEL, [text(n, rng)]) for n in sizes]
    before, cpu_before_s = server.counters(), server.server.cpu_s()["runtime"]
    calls = uvloop.run(saturate(server.url, requests, concurrency, least_s, least_calls))
    counted = server.counters().since(before)
    took_s = max(c.done_s for c in calls) - calls[0].due_s
    devices = len(server.server.parts()["runtime"])
    done = [(c.done_s, float(sizes[c.index % len(sizes)])) for c in calls]
    # The first batches are small, for the queue was empty; and of several devices one runs out of
    # work before the other does.
    last = len(done) - (concurrency // 2 if devices > 1 else 0)
    return Trial(
        steady_rate(done, concurrency // 4, last),
        counted.tokens / (server.server.cpu_s()["runtime"] - cpu_before_s),
        counted.waste,
        counted.batch_items / counted.batches,
        counted.device_s / (took_s * devices),
        # The first calls came all at once to an empty queue: nobody's usual wait.
        [c.latency_s for c in calls[concurrency:] or calls],
    )


def _measure(layout: Layout, *, quick: bool) -> dict[str, list[Trial]]:
    concurrency = layout.clients
    least_s, least_calls = (2.0, 0) if quick else (3.5, concurrency * 5 // 4)
    trials: dict[str, list[Trial]] = {name: [] for name in layout.variants}
    with tempfile.TemporaryDirectory() as folder:
        starts = _starts(Path(folder), layout)
        with several(starts, [MODEL], layout.cores) as servers:
            for server in servers.values():
                trial(server, 99, 16, 0.5, 0)  # the cost model learns
            for n in rounds(layout.rounds, layout.budget_s):
                for name in rotated(list(servers), n):
                    done = trial(servers[name], n, concurrency, least_s, least_calls)
                    trials[name].append(done)
    return trials


def run(report: Report, *, quick: bool) -> None:
    """Part 1."""
    for layout in layouts(quick=quick):
        trials = _measure(layout, quick=quick)
        ratios = {
            name: ratio_interval(
                [
                    (own.tokens_per_s, other.tokens_per_s)
                    for own, other in zip(trials["fair"], trials[name], strict=True)
                ]
            )
            for name in trials
        }
        for name, done in trials.items():
            latencies_s = [value for one in done for value in one.latencies_s]
            middle, low, high = ratios[name]
            report.add(
                **{
                    "1. ragged texts": layout.name,
                    "policy": name,
                    "clients": layout.clients,
                    "tokens/s": median([one.tokens_per_s for one in done]),
                    "tokens/CPU s": median([one.tokens_per_cpu_s for one in done]),
                    "fair is": f"{middle:.2f}x [{low:.2f}, {high:.2f}]",
                    "pad %": 100 * median([one.waste for one in done]),
                    "texts/batch": median([one.batch_items for one in done]),
                    "busy %": 100 * median([one.busy for one in done]),
                    "p50 s": quantile(latencies_s, 0.5),
                    "p95 s": quantile(latencies_s, 0.95),
                    "rounds": len(done),
                }
            )
        if layout.name == "onnx, 1 device":
            report.headline["tokens_ratio_vs_fifo32"] = ratios["fifo32"][0]
            report.headline["tokens_ratio_vs_window64"] = ratios["window64"][0]
    if quick:
        print("part 1 --quick leaves out: two devices, threads, torch, all rounds but one")
