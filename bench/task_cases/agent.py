"""Part 2: an agent of ten models, its calls together and one after another.

The same documents and the same calls both times, on the same server with all models loaded; rounds
alternate. Owns the rounds. Does not own the agent (`examples/contract_review`).
"""

from __future__ import annotations

import asyncio
import time

import httpx
from harness import Report, Server, median
from measure.rounds import rotated, rounds

from examples.contract_review.agent import STEPS, review_all
from examples.contract_review.documents import contracts
from shoal import AsyncClient

TOGETHER, IN_TURN = "together", "one after another"
IN_FLIGHT = {TOGETHER: 64, IN_TURN: 1}
ROUNDS, DOCUMENTS = 3, 6
QUICK_DOCUMENTS = 3  # one of each kind
BUDGET_S = 90.0
TIMEOUT_S = 300.0


def run(report: Report, server: Server, *, quick: bool) -> None:
    """Part 2."""
    cards = httpx.get(f"{server.url}/v1/models").json()["data"]
    away = {one["id"] for one in cards if one["state"] == "unavailable"}
    if missing := away & {step.model for step in STEPS}:
        print(f"part 2 left out: it needs {', '.join(sorted(missing))}")
        return
    documents = QUICK_DOCUMENTS if quick else DOCUMENTS
    files = {one.name: one.blob for one in contracts(documents, seed=1)}
    asyncio.run(_review(server.url, files, IN_FLIGHT[TOGETHER]))  # all is loaded, where it pays
    times_s: dict[str, list[float]] = {name: [] for name in IN_FLIGHT}
    calls = 0
    for number in rounds(1 if quick else ROUNDS, BUDGET_S):
        for name in rotated(list(IN_FLIGHT), number):
            took_s, calls = asyncio.run(_review(server.url, files, IN_FLIGHT[name]))
            times_s[name].append(took_s)
    for name, took in times_s.items():
        report.add(
            **{
                "2. agent, calls": name,
                "models": len({step.model for step in STEPS if step.model}),
                "documents": documents,
                "calls": calls,
                "documents/minute": 60 * documents / median(took),
                "rounds": len(took),
            }
        )
    pairs = zip(times_s[IN_TURN], times_s[TOGETHER], strict=True)
    report.headline["agent_speedup"] = median([slow / fast for slow, fast in pairs])


async def _review(url: str, files: dict[str, bytes], max_in_flight: int) -> tuple[float, int]:
    """Seconds for all documents, and the number of calls."""
    async with AsyncClient(url, timeout_s=TIMEOUT_S) as client:
        begun_s = time.monotonic()
        _, desk = await review_all(client, files, max_in_flight=max_in_flight)
        return time.monotonic() - begun_s, len(desk.calls)
