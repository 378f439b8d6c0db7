"""Part 3: nine embedders and two generators on one machine.

An open loop of single texts, at a share of what the embedders can do, is played in turn with the
generators idle and with texts growing on both of them all the time. Owns the catalog, the rounds
and the ratio. Does not own the texts that grow (`texts`).
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx
import uvloop
import yaml
from harness import Report
from measure.figures import quantile, ratio_interval
from measure.load import lag_s, punctual, saturate
from measure.rounds import rotated
from measure.servers import Watched, watched
from measure.traffic import lengths, request, text, write_catalog
from msgspec import structs

from runtime_cases.places import CACHE, why_not
from runtime_cases.texts import growing
from shoal.catalog.change import plain_entry
from shoal.catalog.load import load
from shoal.catalog.variants import on_runtime, runtimes_of

EMBEDDERS = [f"embedder-{n}" for n in range(9)]
GENERATORS = ["generator-1", "generator-2"]
WAYS = ("idle", "growing")
SHARE = 0.3  # of what the embedders do when nothing else runs
STREAMS = 2  # texts that grow at once on each generator
PATIENCE_S = 20.0
LOAD_S = 180.0


def run(report: Report, *, quick: bool) -> None:
    """Part 3."""
    rounds, seconds = (2, 3.0) if quick else (4, 15.0)
    with tempfile.TemporaryDirectory() as folder:
        catalog = write_catalog(Path(folder) / "catalog", EMBEDDERS)
        runtime = _add_generators(catalog)
        if runtime is None:
            return
        with watched("--cache-dir", str(CACHE), catalog=catalog) as server:
            server.warm_up(EMBEDDERS, 2)
            _wake(server.url)
            rate = SHARE * _capacity(server, 1.0 if quick else 4.0)
            pairs = []
            for number in range(rounds):
                waits = {}
                for way in rotated(WAYS, number):
                    tokens_per_s = 0.0
                    if way == "idle":
                        waits[way] = _play(server, rate, seconds, number)
                    else:
                        waits[way], tokens_per_s = _beside(server, rate, seconds, number)
                    name = f"{len(report.rows) + 1}. {way}"
                    report.add(**_row(name, runtime, rate, waits[way], tokens_per_s))
                pairs.append((quantile(waits["growing"], 0.99), quantile(waits["idle"], 0.99)))
    middle, low, high = ratio_interval(pairs)
    report.add(**{"3. p99 with / without": middle, "low": low, "high": high, "rounds": len(pairs)})
    report.headline["embed_p99_ratio_with_generators"] = middle


def _add_generators(catalog: Path) -> str | None:
    """Two copies of the demo's generator; the runtime that they are on, or None where none is."""
    for entry in (each for each in load(None).entries if each.generates):
        for runtime in runtimes_of(entry):
            if reason := why_not(runtime):
                print(f"left out: {entry.id} on {runtime}: {reason}", flush=True)
                continue
            for name in GENERATORS:
                alone = structs.replace(on_runtime(entry, runtime), id=name, aliases=[])
                (catalog / f"{name}.yaml").write_text(yaml.safe_dump(plain_entry(alone)))
            return f"{entry.id} on {runtime}"
    return None


def _row(
    name: str, runtime: str, rate: float, waits_s: Sequence[float], tokens: float
) -> dict[str, object]:
    return {
        "3. round": name,
        "generators": runtime,
        "offered/s": rate,
        "calls": len(waits_s),
        "lost": sum(math.isinf(wait) for wait in waits_s),
        "p50 ms": 1e3 * quantile(waits_s, 0.5),
        "p95 ms": 1e3 * quantile(waits_s, 0.95),
        "p99 ms": 1e3 * quantile(waits_s, 0.99),
        "generated tok/s": tokens,
    }


def _calls(url: str, count: int, seed: int) -> list[bytes]:
    """Single texts of ragged lengths, each for one of the nine."""
    rng = random.Random(seed)
    sizes = lengths(count, seed)
    return [request(url, rng.choice(EMBEDDERS), [text(n, rng)], "interactive") for n in sizes]


def _capacity(server: Watched, seconds: float) -> float:
    """Calls per second when as many as can be are answered."""
    calls = uvloop.run(saturate(server.url, _calls(server.url, 2_000, 0), 64, seconds))
    return len(calls) / (max(call.done_s for call in calls) - calls[0].due_s)


def _play(server: Watched, rate: float, seconds: float, seed: int) -> list[float]:
    """The latencies, in seconds, of an open loop of Poisson arrivals; the same for each seed."""
    rng = random.Random(seed)
    moments, at_s = [], 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        moments.append(at_s)
    bodies = _calls(server.url, len(moments), seed + 1)
    calls, _ = punctual(server.url, list(zip(moments, bodies, strict=True)), PATIENCE_S)
    print(f"  the load generator was {1e3 * lag_s(calls):.1f} ms late at p99", flush=True)
    return [call.latency_s for call in calls]


def _beside(server: Watched, rate: float, seconds: float, seed: int) -> tuple[list[float], float]:
    """As `_play`, with both generators at work; also the tokens per second that they gave."""
    with growing(server.url, GENERATORS * STREAMS) as grown:
        waits_s = _play(server, rate, seconds, seed)
    return waits_s, grown.tokens_per_s


def _wake(url: str) -> None:
    """Loads the generators, so that no round has a load in it."""
    for name in GENERATORS:
        body = {"model": name, "inputs": "Say hello.", "max_tokens": 2}
        headers = {"x-shoal-deadline-ms": str(int(1e3 * LOAD_S))}
        answer = httpx.post(f"{url}/v1/generate", json=body, headers=headers, timeout=LOAD_S)
        if answer.status_code != 200:
            raise SystemExit(f"{name} does not generate: {answer.text[:300]}")
