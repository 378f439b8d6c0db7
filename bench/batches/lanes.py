"""Part 3: what the tail of short jobs suffers from the long ones beside them.

95 % of the jobs are one ragged text, 5 % are many long texts; they come as a Poisson process at
80 % of what the devices can do. One FIFO; then lanes that only have shares (every quantum so long
that nothing is cut and no lane is the short one, which is what caps the others); then the lanes
that Shoal has by default. Same traces for all.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import uvloop
from harness import Report
from measure.figures import Interval, block_ratio_interval, quantile
from measure.load import MOST_LAG_S, Call, lag_s, punctual, saturate
from measure.rounds import rotated, rounds
from measure.servers import Watched, several
from measure.traffic import lengths, request, text, write_catalog

MODEL = "ragged"
LONG_SHARE = 0.05
LONG_TEXTS, LONG_TOKENS = 12, 128
LOAD = 0.8
PATIENCE_S = 6.0
BLOCK_S = 1.0
BUDGET_S = 30.0

# Ageing is a wait per quantum: with a quantum a hundred times as long it stays what it is by
# default only if the age is, too.
VARIANTS = {
    "fifo": ("--policy", "oldest", "--lanes", "interactive:1:400ms:1s"),
    "lanes, no quanta or cap": ("--lanes", "interactive:8:10000ms:100s,bulk:2:10000ms:125s"),
    "lanes": (),
}
# With equal quanta no lane is the long one, and nothing is capped.
ONLY_ON_SEVERAL = {
    "lanes, quanta, no cap": (
        "--lanes",
        "interactive:8:100ms:1s,bulk:2:100ms:1.25s",
    )
}


@dataclass(frozen=True, slots=True)
class Job:
    """One job of a trace, at a rate of one per second."""

    at_s: float
    tokens: tuple[int, ...]

    @property
    def long(self) -> bool:
        """Whether it is one of the few that are large."""
        return len(self.tokens) > 1


def trace(count: int, seed: int) -> list[Job]:
    """`count` jobs; every twentieth on average is long."""
    rng = random.Random(seed)
    at_s, jobs = 0.0, []
    for tokens in lengths(count, seed):
        at_s += rng.expovariate(1.0)
        long = rng.random() < LONG_SHARE
        jobs.append(Job(at_s, (LONG_TOKENS,) * LONG_TEXTS if long else (tokens,)))
    return jobs


def _requests(server: Watched, jobs: list[Job], *, lanes: bool, seed: int) -> list[bytes]:
    rng = random.Random(seed)
    return [
        request(
            server.url,
            MODEL,
            [text(n, rng) for n in job.tokens],
            "bulk" if lanes and job.long else None,
        )
        for job in jobs
    ]


def jobs_per_s(server: Watched, devices: int, seconds: float, *, lanes: bool) -> float:
    """What the devices can do of this mix, in a closed loop."""
    jobs = trace(2_000, seed=99)
    requests = _requests(server, jobs, lanes=lanes, seed=99)
    before = server.counters()
    uvloop.run(saturate(server.url, requests, 16 * devices, seconds))
    counted = server.counters().since(before)
    tokens_per_job = sum(sum(job.tokens) for job in jobs) / len(jobs)
    return devices * counted.tokens / counted.device_s / tokens_per_job


@dataclass(slots=True)
class Trial:
    """One variant on one trace."""

    jobs: list[Job]
    calls: list[Call]
    rate: float

    def latencies_s(self, *, long: bool) -> list[float]:
        """Of the jobs of one kind."""
        pairs = zip(self.jobs, self.calls, strict=True)
        return [call.latency_s for job, call in pairs if job.long == long]

    def blocks(self) -> list[list[float]]:
        """Latencies of short jobs, by the stretch of the trace that they were due in."""
        found: dict[int, list[float]] = {}
        for job, call in zip(self.jobs, self.calls, strict=True):
            if not job.long:
                block = found.setdefault(int(job.at_s / self.rate / BLOCK_S), [])
                block.append(call.latency_s)
        return [found.get(n, []) for n in range(max(found) + 1)]


def _measure(
    devices: int, most: int, seconds: float, variants: dict[str, tuple[str, ...]]
) -> tuple[float, dict[str, list[Trial]]]:
    trials: dict[str, list[Trial]] = {name: [] for name in variants}
    with tempfile.TemporaryDirectory() as folder:
        catalog = write_catalog(Path(folder) / "catalog", [MODEL])
        starts = {
            name: ((*flags, "--devices", f"cpu:{devices}"), catalog)
            for name, flags in variants.items()
        }
        with several(starts, [MODEL], devices) as servers:
            for name, server in servers.items():  # the cost model learns, on all alike
                capacity = jobs_per_s(server, devices, 1.5, lanes=name != "fifo")
            rate = LOAD * capacity
            for n in rounds(most, BUDGET_S):
                for name in rotated(list(variants), n):
                    jobs = trace(round(rate * seconds), seed=n)
                    requests = _requests(servers[name], jobs, lanes=name != "fifo", seed=n)
                    moments = [job.at_s / rate for job in jobs]
                    schedule = list(zip(moments, requests, strict=True))
                    calls, _ = punctual(servers[name].url, schedule, PATIENCE_S)
                    trials[name].append(Trial(jobs, calls, rate))
    return rate, trials


def _ratio(trials: dict[str, list[Trial]], name: str) -> Interval:
    pairs = [
        (a, b)
        for fifo, other in zip(trials["fifo"], trials[name], strict=True)
        for a, b in zip(fifo.blocks(), other.blocks(), strict=True)
    ]
    return block_ratio_interval(pairs, lambda values: quantile(values, 0.99))


def run(report: Report, *, quick: bool) -> None:
    """Part 3."""
    for devices in (1,) if quick else (1, 2):
        variants = {n: VARIANTS[n] for n in ("fifo", "lanes")} if quick else VARIANTS
        if devices > 1:
            variants = variants | ONLY_ON_SEVERAL
        rate, trials = _measure(devices, 1 if quick else 4, 4.0 if quick else 7.0, variants)
        for name, done in trials.items():
            short = [value for one in done for value in one.latencies_s(long=False)]
            long = [value for one in done for value in one.latencies_s(long=True)]
            lagged_s = max(lag_s(one.calls) for one in done)
            middle, low, high = _ratio(trials, name)
            report.add(
                **{
                    "3. short beside long": name,
                    "devices": devices,
                    "jobs/s": rate,
                    "short p50 s": quantile(short, 0.5),
                    "short p99 s": quantile(short, 0.99),
                    "fifo over it": f"{middle:.2f}x [{low:.2f}, {high:.2f}]",
                    "long p50 s": quantile(long, 0.5),
                    "long p95 s": quantile(long, 0.95),
                    "short+long": f"{len(short)}+{len(long)}",
                    "lag p99 ms": f"{1e3 * lagged_s:.1f}{' VOID' * (lagged_s > MOST_LAG_S)}",
                }
            )
        if devices == 1:
            report.headline["short_p99_fifo_over_lanes"] = _ratio(trials, "lanes")[0]
    if quick:
        print("part 3 --quick leaves out: two devices, lanes without quanta, all rounds but one")
