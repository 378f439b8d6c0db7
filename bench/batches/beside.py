"""Part 5: single calls beside a large one, the commonest mix there is: one indexes, others search.

The same model and lane, and no header: once the single calls are of the large one's tenant, and
once of another. Rounds of all four in turn: singles alone, the large one alone, and both together
with either tenant. The singles are an open loop, few enough to leave the large call nearly all of
the device, and come for as long as it took alone.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from harness import Report, median
from measure.figures import quantile
from measure.load import MOST_LAG_S, SETTLE_S, Call, lag_s, offer, saturate
from measure.servers import Watched, watched
from measure.traffic import lengths, request, text, write_catalog

MODEL = "ragged"
LARGE_TEXTS = 2_000
SINGLES_PER_S = 2.0
LEAST_S = 20.0
PATIENCE_S = 60.0
KINDS = ("alone", "same tenant", "another tenant")


@dataclass(slots=True)
class Trial:
    """One kind over all rounds. texts_per_s: of the large calls."""

    latencies_s: list[float] = field(default_factory=list)
    texts_per_s: list[float] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)


def _singles(url: str, seconds: float, seed: int, tenant: str | None) -> list[tuple[float, bytes]]:
    rng = random.Random(seed)
    count = round(SINGLES_PER_S * seconds)
    at_s, schedule = 0.0, []
    for tokens in lengths(count, seed):
        at_s += rng.expovariate(SINGLES_PER_S)
        made = request(url, MODEL, [text(tokens, rng)])
        if tenant is not None:
            made = made.replace(b"\r\n", f"\r\nx-shoal-tenant: {tenant}\r\n".encode(), 1)
        schedule.append((at_s, made))
    return schedule


def _large(url: str, seed: int) -> bytes:
    rng = random.Random(seed)
    made = request(url, MODEL, [text(n, rng) for n in lengths(LARGE_TEXTS, seed)])
    return made.replace(b"\r\n", b"\r\nx-shoal-deadline-ms: 120000\r\n", 1)


def _texts_per_s(calls: list[Call]) -> float:
    return LARGE_TEXTS * len(calls) / (max(call.done_s for call in calls) - calls[0].sent_s)


async def _both(
    url: str, large: bytes, schedule: list[tuple[float, bytes]]
) -> tuple[list[Call], list[Call]]:
    """The large calls, and the single ones, of which the first comes a moment later."""
    running = asyncio.create_task(saturate(url, [large], 1, 0.0, 1))
    await asyncio.sleep(SETTLE_S)
    singles = await offer(url, schedule, PATIENCE_S)
    return await running, singles


def _measure(server: Watched, rounds: int) -> tuple[dict[str, Trial], list[float]]:
    trials = {kind: Trial() for kind in KINDS}
    large_alone: list[float] = []
    for n in range(rounds):
        large = _large(server.url, n)
        calls = uvloop.run(saturate(server.url, [large], 1, 0.0, 1))
        large_alone.append(_texts_per_s(calls))
        seconds = max(LEAST_S, 0.9 * LARGE_TEXTS / large_alone[-1])
        for kind in KINDS:
            tenant = "another" if kind == "another tenant" else None
            schedule = _singles(server.url, seconds, n, tenant)
            time.sleep(SETTLE_S)
            if kind == "alone":
                singles = uvloop.run(offer(server.url, schedule, PATIENCE_S))
            else:
                calls, singles = uvloop.run(_both(server.url, large, schedule))
                trials[kind].texts_per_s.append(_texts_per_s(calls))
            trials[kind].latencies_s += [call.latency_s for call in singles]
            trials[kind].lags_s.append(lag_s(singles))
    return trials, large_alone


def run(report: Report, *, quick: bool) -> None:
    """Part 5."""
    with tempfile.TemporaryDirectory() as folder:
        catalog = write_catalog(Path(folder) / "catalog", [MODEL])
        with watched("--devices", "cpu:1", catalog=catalog) as server:
            server.warm_up([MODEL], 1)
            learning = [made for _, made in _singles(server.url, 60.0, 99, None)]
            uvloop.run(saturate(server.url, learning, 16, 6.0))
            trials, large_alone = _measure(server, 1 if quick else 3)
    alone_s = quantile(trials["alone"].latencies_s, 0.95)
    for kind, trial in trials.items():
        kept = [a / b for a, b in zip(trial.texts_per_s, large_alone, strict=False)]
        report.add(
            **{
                "5. singles beside a large call": kind,
                "p50 s": quantile(trial.latencies_s, 0.5),
                "p95 s": quantile(trial.latencies_s, 0.95),
                "p95 over alone": quantile(trial.latencies_s, 0.95) / alone_s,
                "large texts/s": median(trial.texts_per_s) if kept else median(large_alone),
                "large keeps": median(kept) if kept else 1.0,
                "calls": len(trial.latencies_s),
                "lag p99 ms": 1e3 * max(trial.lags_s),
            }
        )
    beside = [trials[kind] for kind in KINDS[1:]]
    report.headline["big_beside_small_p95_ratio"] = max(
        quantile(trial.latencies_s, 0.95) / alone_s for trial in beside
    )
    report.headline["big_kept_throughput"] = min(
        median([a / b for a, b in zip(trial.texts_per_s, large_alone, strict=True)])
        for trial in beside
    )
    if max(lag for trial in trials.values() for lag in trial.lags_s) > MOST_LAG_S:
        print("part 5: the load generator lagged; its latencies are too high, if anything")
