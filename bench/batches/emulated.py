"""Part 6: the policy on devices that are emulated, on a mock clock: slow ones, and idle ones.

A device's batch takes a launch, something for each padded pass, and its padded tokens; here 1, 5
and 20 times what a fast CPU takes for MiniLM. A closed loop of single ragged texts keeps the window
full. The bare engine gets as many texts at once as the loop has open, each time anew, in the best
passes there are. The burst is the trace that once starved a steady model: ten minutes of one
model alone at half load, then four hundred calls to another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from harness import Report
from measure.traffic import lengths

from shoal.core.baselines import BaselinePolicy
from shoal.core.batching import partition
from shoal.core.cost import CostModel, CostState
from shoal.core.lanes import DEFAULT_LANES, parse_lanes
from shoal.core.line import ModelRule
from shoal.core.policy import Policy
from shoal.core.schedule import Scheduler
from shoal.core.types import Batch, Item

BLOCK_TOKENS = 1024
LAUNCH_S, PASS_S, TOKEN_S = 2e-3, 1e-3, 6e-5
SLOWER = (1, 5, 20)
CLIENTS = 96
NEVER_S = 1e12


class Device:
    """What a batch takes on an emulated device."""

    def __init__(self, slower: float) -> None:
        self.slower = slower

    def took_s(self, batch: Batch) -> float:
        """Seconds of a batch."""
        sizes = [n for item in batch.items for n in item.lengths_tokens]
        block_tokens = batch.block_tokens or sum(sizes) * len(sizes)
        passes = len(partition(sizes, block_tokens))
        return self.slower * (LAUNCH_S + PASS_S * passes + TOKEN_S * batch.work.padded_tokens)

    def bare_tokens_per_s(self) -> float:
        """Useful tokens per second of batches of all texts that are open."""
        sizes, took_s = lengths(8_192, seed=7), 0.0
        for at in range(0, len(sizes), CLIENTS):
            few = sizes[at : at + CLIENTS]
            groups = partition(few, BLOCK_TOKENS)
            padded = sum(max(few[i] for i in group) * len(group) for group in groups)
            took_s += self.slower * (LAUNCH_S + PASS_S * len(groups) + TOKEN_S * padded)
        return sum(sizes) / took_s


def _fair(slower: float, *models: str) -> Scheduler:
    policy = Scheduler(parse_lanes(DEFAULT_LANES), devices=1)
    for model in models:
        rule = ModelRule(model, 1.0, False, BLOCK_TOKENS, 4_096, 65_536)
        policy.add_model(rule, CostModel(CostState(LAUNCH_S * slower, TOKEN_S * slower)))
    return policy


def tokens_per_s(policy: Policy, device: Device, texts: int) -> float:
    """Useful tokens per second of device time in a closed loop of single texts."""
    sizes = itertools.cycle(lengths(8_192, seed=7))
    names = itertools.count()

    def more(count: int, now_s: float) -> Iterator[Item]:
        for _ in range(count):
            name = str(next(names))
            yield Item(name, "m", "interactive", (next(sizes),), NEVER_S, now_s, request=name)

    now_s, served, tokens = 0.0, 0, 0
    for item in more(CLIENTS, now_s):
        policy.add(item, now_s)
    warm_s = warm_tokens = 0.0
    while served < texts:
        batch = policy.next_batch(now_s, 1, lambda _: "free")
        if batch is None:
            at_s = policy.deadline(now_s)
            now_s = max(now_s + 1e-3, at_s if at_s is not None and at_s < NEVER_S / 2 else now_s)
            continue
        took_s = device.took_s(batch)
        now_s += took_s
        policy.finished(batch, took_s, now_s)
        served += len(batch.items)
        tokens += batch.tokens
        if served < texts // 4:  # costs are learnt
            warm_s, warm_tokens = now_s, tokens
        for item in more(len(batch.items), now_s):
            policy.add(item, now_s)
    return (tokens - warm_tokens) / (now_s - warm_s)


def expired_after_idle() -> tuple[int, float]:
    """Of the steady model's calls those that expired after the burst, and their worst wait."""
    device, now_s = Device(1), 0.0
    policy = _fair(device.slower, "steady", "burst")
    whole = device.slower * (LAUNCH_S + PASS_S + TOKEN_S * 900)
    arrivals = [(n * whole / 0.5, "steady", 10.0) for n in range(int(640 * 0.5 / whole))]
    arrivals += [(600.0, "burst", NEVER_S) for _ in range(400)]
    arrivals.sort()
    expired, worst_s, at = 0, 0.0, 0
    while at < len(arrivals) or any(
        len(policy.window(m, "interactive")) for m in ("steady", "burst")
    ):
        while at < len(arrivals) and arrivals[at][0] <= now_s:
            due_s, model, within_s = arrivals[at]
            item = Item(str(at), model, "interactive", (900,), due_s + within_s, due_s)
            policy.add(item, now_s)
            at += 1
        batch = policy.next_batch(now_s, 1, lambda _: "free")
        gone = policy.expire(now_s, lambda _: "busy")
        expired += sum(item.model == "steady" for item in gone)
        if batch is None:
            if at < len(arrivals):
                now_s = max(now_s, arrivals[at][0])
            continue
        waits = [now_s - item.arrived_s for item in batch.items if item.model == "steady"]
        worst_s = max(worst_s, *waits, 0.0)
        took_s = device.took_s(batch)
        now_s += took_s
        policy.finished(batch, took_s, now_s)
    return expired, worst_s


def run(report: Report, *, quick: bool) -> None:
    """Part 6."""
    texts = 8_000 if quick else 40_000
    over_buckets, over_bare = [], []
    for slower in SLOWER:
        device = Device(slower)
        fair, bare = tokens_per_s(_fair(slower, "m"), device, texts), device.bare_tokens_per_s()
        buckets = tokens_per_s(BaselinePolicy("buckets", max_items=4_096), device, texts)
        over_buckets.append(fair / buckets)
        over_bare.append(fair / bare)
        report.add(
            **{
                "6. emulated device, times slower": slower,
                "fair tokens/s": fair,
                "buckets tokens/s": buckets,
                "fair over buckets": fair / buckets,
                "fair over the bare engine": fair / bare,
            }
        )
    report.headline["fair_over_buckets_slow"] = min(over_buckets)
    report.headline["fair_over_bare_slow"] = min(over_bare)
    expired, worst_s = expired_after_idle()
    report.add(
        **{"6. burst after idle": "steady model", "expired": expired, "worst wait s": worst_s}
    )
    report.headline["burst_after_idle_expired"] = expired
