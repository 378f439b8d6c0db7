"""`shoal plan`: what fits on a machine, and what more memory would buy.

Owns reading traces and measured sizes, the guess of a load's time, and the table. Does not own the
simulation (`shoal.sim`), the policy (`shoal.core`) or the picture (`plan_picture`).
"""

from __future__ import annotations

import csv
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from shoal.catalog.estimate import memory_mib
from shoal.catalog.load import load
from shoal.catalog.schema import Entry
from shoal.catalog.snapshot import Snapshot
from shoal.cli.plan_picture import picture
from shoal.core.residency import Memory
from shoal.core.residency_plan import ResidencyPlanner
from shoal.core.residency_rank import Known, RankingName, make_ranking
from shoal.errors import SettingsError
from shoal.sim.residency import Machine, Report, ResidencySimulation, quantile
from shoal.sim.workload import Arrival, Popularity, SimModel

MAX_REQUESTS = 1_000_000
MIB = 1024 * 1024
GUESS_BASE_S = 0.3
GUESS_BYTES_PER_S = 400 * MIB


@dataclass(frozen=True, slots=True)
class Setup:
    """What is planned for: memory of each device, and how many there are."""

    memory_mib: int
    devices: int = 1


class _Measured(msgspec.Struct, frozen=True):
    size_bytes: int
    load_s: float


def plan(
    catalog: Path | None,
    traffic: Path | Popularity,
    setup: Setup,
    *,
    rankings: Sequence[RankingName] = ("density",),
    measured: Path | None = None,
    svg: Path | None = None,
    seed: int = 0,
) -> None:
    """Prints the plan of one ranking, or the comparison of several. Raises `OperatorError`."""
    snapshot = load(catalog)
    models = models_of(snapshot.entries, read_measured(measured) if measured else {})
    if isinstance(traffic, Popularity):
        if traffic.rate * traffic.minutes * 60.0 > MAX_REQUESTS:
            raise SettingsError(f"more than {MAX_REQUESTS:,} requests; take fewer minutes")
        rng = random.Random(seed)  # noqa: S311 - traffic, not secrets
        arrivals = traffic.trace([model.model for model in models], rng)
    else:
        arrivals = read_trace(traffic, snapshot)
    if not arrivals:
        raise SettingsError("the trace has no request")
    console = Console(highlight=False)
    console.print(
        f"{len(models)} models, {sum(m.size_bytes for m in models) / MIB:,.0f} MiB in all"
    )
    if len(rankings) > 1:
        console.print(_comparison(models, arrivals, setup, rankings))
        return
    report = simulate(models, arrivals, setup, rankings[0])
    console.print(_residents(models, arrivals, report))
    larger = Setup(setup.memory_mib + 1024, setup.devices)
    after = simulate(models, arrivals, larger, rankings[0])
    console.print(_figures(report, after))
    if report.unserved:
        console.print("Some models are too large for this memory: see `never` above.")
    if svg is not None:
        svg.write_text(picture(models, report), encoding="utf-8")
        console.print(f"wrote {svg}")


def models_of(entries: Iterable[Entry], measured: Mapping[str, _Measured]) -> list[SimModel]:
    """Entries as the simulation wants them; measured where known, else estimated.

    measured: by model key. Without it a load is guessed to take 0.3 s and a second for 400 MiB.
    """
    models = []
    for entry in entries:
        known = measured.get(entry.key)
        size_bytes = known.size_bytes if known else memory_mib(entry) * MIB
        load_s = known.load_s if known else GUESS_BASE_S + size_bytes / GUESS_BYTES_PER_S
        models.append(SimModel(entry.id, size_bytes, load_s, entry.pinned))
    return models


def read_measured(path: Path) -> dict[str, _Measured]:
    """What a worker has measured, by model key; of several measurements of one, the largest.

    The file is `memory.json` in a worker's cache folder. Raises `SettingsError`.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, _Measured])
    except (OSError, msgspec.MsgspecError) as error:
        raise SettingsError(f"{path} has no measured sizes: {error}") from error
    measured: dict[str, _Measured] = {}
    for name, one in found.items():
        key = name.split(" ")[0]
        if key not in measured or one.size_bytes > measured[key].size_bytes:
            measured[key] = one
    return measured


def read_trace(path: Path, snapshot: Snapshot) -> list[Arrival]:
    """A trace in order of time: CSV with a header, or JSON lines, of `time_s` and `model`.

    Raises `SettingsError` with the line that is wrong, and `UnknownModel`.
    """
    arrivals: list[Arrival] = []
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            is_json = path.suffix in (".jsonl", ".ndjson", ".json")
            rows = map(json.loads, lines) if is_json else csv.DictReader(lines)
            for row in rows:
                if len(arrivals) == MAX_REQUESTS:
                    raise SettingsError(f"{path} has more than {MAX_REQUESTS:,} requests")
                model = snapshot.resolve(row["model"]).id
                arrivals.append(Arrival(float(row["time_s"]), model))
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        number = len(arrivals) + 1
        raise SettingsError(
            f"{path}: request {number} has no `time_s` and `model`: {error!r}"
        ) from error
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def simulate(
    models: Sequence[SimModel], arrivals: Sequence[Arrival], setup: Setup, ranking: RankingName
) -> Report:
    """What a ranking makes of the traffic on a machine whose devices have each its own memory."""
    budget_bytes = setup.memory_mib * MIB
    times: defaultdict[str, list[float]] = defaultdict(list)
    for arrival in arrivals:
        times[arrival.model].append(arrival.at_s)
    sizes = {model.model: model.size_bytes for model in models}
    counts = Counter(arrival.model for arrival in arrivals)
    known = Known(sizes, budget_bytes * setup.devices, counts, times)
    names = [f"device {number}" for number in range(setup.devices)]
    machine = Machine(tuple(Memory(name, budget_bytes, 0, (name,)) for name in names))
    policy = ResidencyPlanner(make_ranking(ranking, known))
    return ResidencySimulation(machine, models, policy).run(arrivals)


def _residents(models: Sequence[SimModel], arrivals: Sequence[Arrival], report: Report) -> Table:
    """One row for each model: how large, how popular, and how much of the time it is loaded."""
    counts = Counter(arrival.model for arrival in arrivals)
    loads = Counter(stay.model for stay in report.stays)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("MODEL", no_wrap=True)
    for title in ("MIB", "LOAD S", "REQUESTS", "LOADS", "RESIDENT"):
        table.add_column(title, justify="right")
    for model in sorted(models, key=lambda m: (-report.resident_share(m.model), m.model)):
        share = report.resident_share(model.model)
        never = counts[model.model] and not loads[model.model]
        table.add_row(
            model.model,
            f"{model.size_bytes / MIB:.0f}",
            f"{model.load_s:.2f}",
            str(counts[model.model]),
            str(loads[model.model]),
            "never" if never else f"{share:.0%}",
        )
    return table


def _figures(report: Report, after: Report) -> Table:
    """The sums, beside those with another GiB for each device."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("AS PLANNED", justify="right")
    table.add_column("+1 GIB A DEVICE", justify="right")
    rows = {
        "load seconds per 1,000 requests": [f"{r.load_s_per_1000:.1f}" for r in (report, after)],
        "loads": [str(r.loads) for r in (report, after)],
        "requests that find no copy": [f"{r.cold_share:.1%}" for r in (report, after)],
        "wait p50": [f"{quantile(r.waits_s, 0.5):.3f} s" for r in (report, after)],
        "wait p95": [f"{quantile(r.waits_s, 0.95):.3f} s" for r in (report, after)],
        "wait p95 of those that find none": [
            f"{quantile(r.cold_waits_s, 0.95):.3f} s" for r in (report, after)
        ],
        "devices busy": [f"{r.utilisation:.1%}" for r in (report, after)],
        "requests never served": [str(r.unserved) for r in (report, after)],
    }
    for device in sorted({stay.device for stay in report.stays}):
        rows[f"models on {device}, on average"] = [
            f"{sum(s.to_s - s.from_s for s in r.stays if s.device == device) / r.end_s:.1f}"
            for r in (report, after)
        ]
    for title, cells in rows.items():
        table.add_row(title, *cells)
    return table


def _comparison(
    models: Sequence[SimModel],
    arrivals: Sequence[Arrival],
    setup: Setup,
    rankings: Sequence[RankingName],
) -> Table:
    """One row for each ranking."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("POLICY")
    for title in ("LOAD S / 1,000", "LOADS", "COLD", "P50 S", "P95 S", "COLD P95 S", "BUSY"):
        table.add_column(title, justify="right")
    for ranking in rankings:
        report = simulate(models, arrivals, setup, ranking)
        table.add_row(
            ranking,
            f"{report.load_s_per_1000:.1f}",
            str(report.loads),
            f"{report.cold_share:.1%}",
            f"{quantile(report.waits_s, 0.5):.3f}",
            f"{quantile(report.waits_s, 0.95):.3f}",
            f"{quantile(report.cold_waits_s, 0.95):.3f}",
            f"{report.utilisation:.1%}",
        )
    return table
