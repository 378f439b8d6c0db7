"""Part 4: what the policy itself costs, in process and without a runtime.

A window of one model is kept full with n single texts of ragged lengths: take a batch, give the
policy its time, add as many texts anew. The cost is CPU time over texts served. Per text it may
grow with the logarithm of the window at most.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from harness import Report, median
from measure.traffic import lengths

from shoal.core.baselines import BaselinePolicy
from shoal.core.cost import CostModel, CostState
from shoal.core.lanes import parse_lanes
from shoal.core.line import ModelRule
from shoal.core.policy import Policy
from shoal.core.schedule import Scheduler
from shoal.core.types import Item

MODEL = "ragged"
WINDOWS = (16, 256, 4096)
LAUNCH_S, TOKEN_S = 2e-3, 2e-4
NEVER_S = 1e12


def _scheduler(window: int, *, packing: bool) -> Scheduler:
    policy = Scheduler(parse_lanes("interactive:8:100ms:1s"), devices=1)
    rule = ModelRule(MODEL, 1.0, packing, 1024, window, 65_536)
    policy.add_model(rule, CostModel(CostState(LAUNCH_S, TOKEN_S)))
    return policy


def cost_us(policy: Policy, window: int, served: int) -> tuple[float, float]:
    """CPU microseconds for each text, and texts in a batch, over about `served` texts."""
    sizes = lengths(8192, seed=window)
    items = [
        Item(str(n), MODEL, "interactive", (sizes[n % len(sizes)],), NEVER_S, 0.0)
        for n in range(window + served + 4096)
    ]
    for item in items[:window]:
        policy.add(item, 0.0)
    at, batches, now_s = window, 0, 0.0
    begun_s = time.process_time()
    while at < window + served:
        batch = policy.next_batch(now_s, 1, lambda _: "free")
        if batch is None:
            raise SystemExit("a policy with a full window formed no batch")
        took_s = LAUNCH_S + TOKEN_S * batch.work.padded_tokens
        now_s += took_s
        policy.finished(batch, took_s, now_s)
        policy.expire(now_s, lambda _: "busy")
        for item in items[at : at + len(batch.items)]:
            policy.add(item, now_s)
        at += len(batch.items)
        batches += 1
    texts = at - window
    return 1e6 * (time.process_time() - begun_s) / texts, texts / batches


def run(report: Report, *, quick: bool) -> None:
    """Part 4."""
    rounds, served = (3, 1_000) if quick else (5, 4_000)
    makers: dict[str, Callable[[int], Policy]] = {
        "fair, padded": lambda n: _scheduler(n, packing=False),
        "fair, packing": lambda n: _scheduler(n, packing=True),
        "fifo32": lambda n: BaselinePolicy("fifo32", max_items=n),
    }
    for name, make in makers.items():
        costs: dict[int, list[float]] = {n: [] for n in WINDOWS}
        texts: dict[int, float] = {}
        for _ in range(rounds):
            for window in WINDOWS:
                cost, texts[window] = cost_us(make(window), window, served)
                costs[window].append(cost)
        us = {window: median(costs[window]) for window in WINDOWS}
        row = {f"us a text, {n} wait": us[n] for n in WINDOWS}
        growth = us[WINDOWS[-1]] / us[WINDOWS[0]]
        report.add(
            **{"4. price of a policy": name},
            **row,
            **{
                "growth": growth,
                "log n would be": math.log(WINDOWS[-1]) / math.log(WINDOWS[0]),
                "texts a batch": texts[WINDOWS[-1]],
            },
        )
        if name == "fair, padded":
            report.headline["policy_us_per_item_4096"] = us[WINDOWS[-1]]
