"""The scheduler on a mock clock: bounds on waiting, shares, deadlines, lanes, starvation."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.baselines import BaselinePolicy
from shoal.core.cost import CostModel, CostState
from shoal.core.lanes import DEFAULT_LANES, LaneRule, parse_lanes
from shoal.core.line import ModelRule
from shoal.core.schedule import Scheduler
from shoal.core.turns import MAX_DEBT_S
from shoal.core.types import Item
from shoal.errors import SettingsError
from tests.support.policy_drive import drive

LAUNCH_S, TOKEN_S, QUANTUM_S = 0.002, 1e-4, 0.1
BUDGET = int((QUANTUM_S - LAUNCH_S) / TOKEN_S)
LANES = (LaneRule("interactive", 8.0, QUANTUM_S, 1.0), LaneRule("bulk", 2.0, 0.4, 5.0))


class KnownCost(CostModel):
    """A cost model of a device that is known exactly and never changes."""

    def observe(self, work, took_s):
        pass


def took_s(batch):
    return LAUNCH_S + TOKEN_S * batch.work.padded_tokens


def scheduler(models, *, devices=1, packing=True, weights=None, lanes=LANES, **more):
    made = Scheduler(lanes, devices=devices, **more)
    for model in models:
        weight = (weights or {}).get(model, 1.0)
        rule = ModelRule(model, weight, packing, 1024, 100_000, 100_000)
        made.add_model(rule, KnownCost(CostState(LAUNCH_S, TOKEN_S, factor=1.0)))
    return made


_serial = iter(range(10**9))


def item(model="a", tokens=50, at=0.0, lane="interactive", *, deadline_s=1e9, tenant=""):
    lengths = (tokens,) if isinstance(tokens, int) else tuple(tokens)
    return Item(f"{model}{next(_serial)}", model, lane, lengths, deadline_s, at, tenant)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 4))
def test_schedule_oldest_head_keeps_the_waiting_bound(seed, n_models, devices):
    """Start <= q + ceil((M - 1) / W) * q, where no model's backlog is more than one batch."""
    rng = random.Random(seed)
    models = [f"m{n}" for n in range(n_models)]
    policy = scheduler(models, devices=devices, mode="oldest")
    # A burst per model, no larger than a batch, and the next one after the bound has passed.
    bound_s = QUANTUM_S * (1 + math.ceil((n_models - 1) / devices))
    arrivals = []
    for model in models:
        at = rng.uniform(0, 0.3)
        for _ in range(3):
            left = BUDGET
            while left > 20:
                tokens = rng.randint(8, min(256, left))
                arrivals.append(item(model, tokens, at + rng.uniform(0, 0.01)))
                left -= tokens + rng.choice([0, 0, 300])
            at += bound_s + QUANTUM_S + 0.02
    done = drive(policy, arrivals, took_s, devices)
    worst_s = max(done.starts_s[i.id] - i.arrived_s for i in arrivals)
    assert worst_s <= bound_s + 1e-9


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.integers(1, 3))
def test_schedule_serves_everything_once_and_idles_never(seed, packing, devices):
    """Random work of models, lanes and lengths: all of it runs once; batches keep their quantum."""
    rng = random.Random(seed)
    policy = scheduler(["a", "b", "c"], devices=devices, packing=packing)
    arrivals = [
        item(
            rng.choice("abc"),
            [rng.randint(1, 300) for _ in range(rng.randint(1, 3))],
            rng.uniform(0, 2),
            rng.choice(["interactive", "bulk"]),
            tenant=rng.choice(["", "x", "y"]),
        )
        for _ in range(150)
    ]
    done = drive(policy, arrivals, took_s, devices)
    assert set(done.starts_s) == {i.id for i in arrivals}
    quanta = {lane.name: lane.quantum_s for lane in LANES}
    for start, end, batch in done.batches:
        if len(batch.items) > 1:
            assert end - start <= quanta[batch.lane] * 1.35  # passes inside a batch launch too
    if devices == 1:  # work conserving: no gap while something waits
        ends = sorted(done.batches)
        for (_, end, _), (start, _, _) in itertools.pairwise(ends):
            idle = [i for i in arrivals if i.arrived_s < start - 1e-9 and end < start - 1e-9]
            assert not [i for i in idle if done.starts_s[i.id] >= start and i.arrived_s <= end]


def test_schedule_long_input_starts_under_endless_short_ones():
    """A long input is not overtaken for ever by a stream of short ones that fills the device."""
    policy = scheduler(["a"], packing=False)
    short = [item(tokens=10, at=n * 0.001) for n in range(8000)]  # just what the device can do
    long = item(tokens=250, at=1.0)
    done = drive(policy, [*short, long], took_s, 1)
    before = [i for i in short if i.arrived_s <= 1.0 and done.starts_s[i.id] >= 1.0]
    bound_s = QUANTUM_S * (2 + sum(i.tokens for i in before) / BUDGET)
    assert done.starts_s[long.id] - 1.0 <= bound_s


@pytest.mark.parametrize("weights", [{"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 3.0}])
def test_schedule_shares_device_time_by_weight(weights):
    """Two models that always have work get device seconds in proportion to their weights."""
    policy = scheduler(["a", "b"], weights=weights)
    # The cheap one sends twenty times as many tokens: its share must not follow its volume.
    arrivals = [item("a", 200) for _ in range(2000)] + [item("b", 50) for _ in range(4000)]
    done = drive(policy, arrivals, took_s, 1)
    device_s = done.device_s(lambda b: b.model, until_s=10.0)
    assert device_s["b"] / device_s["a"] == pytest.approx(weights["b"] / weights["a"], rel=0.1)


def test_schedule_bulk_has_its_share_and_no_more():
    """Under full interactive load bulk gets its weight's share of device time."""
    policy = scheduler(["a"])
    arrivals = [
        item(tokens=100, lane=lane) for lane in ("interactive", "bulk") for _ in range(4000)
    ]
    done = drive(policy, arrivals, took_s, 1)
    device_s = done.device_s(lambda b: b.lane, until_s=20.0)
    assert device_s["bulk"] / sum(device_s.values()) == pytest.approx(0.2, abs=0.05)


def test_schedule_lone_bulk_gets_the_whole_device():
    """Without interactive work bulk runs in its own, longer quanta, on every device."""
    policy = scheduler(["a"], devices=2)
    done = drive(policy, [item(tokens=100, lane="bulk") for _ in range(500)], took_s, 2)
    longest_s = max(end - start for start, end, _ in done.batches)
    assert 0.3 < longest_s <= 0.4
    starts = sorted(start for start, _, _ in done.batches)
    assert starts[0] == starts[1] == 0.0


def test_schedule_caps_long_work_while_short_work_is_active():
    """Of three devices one stays free of bulk while interactive work keeps coming."""
    policy = scheduler(["a", "b"], devices=3)
    short = [item("a", 20, at=n * 0.05) for n in range(100)]
    bulk = [item("b", 100, lane="bulk", at=0.01) for _ in range(2000)]
    done = drive(policy, [*short, *bulk], took_s, 3)
    runs = [(s, e) for s, e, b in done.batches if b.lane == "bulk" and 0.02 < s < 4.9]
    together = max(sum(1 for s, e in runs if s <= t < e) for t, _ in runs)
    assert together == 2
    assert max(e - s for s, e in runs) <= QUANTUM_S + 0.01
    waits = sorted(done.starts_s[i.id] - i.arrived_s for i in short)
    assert waits[-1] <= QUANTUM_S


def test_schedule_keeps_a_device_free_of_items_that_take_long():
    """Pages of a second each, in the lane of short texts: one of two devices stays theirs."""
    policy = scheduler(["text", "page"], devices=2)
    short = [item("text", 20, at=n * 0.05) for n in range(200)]
    pages = [item("page", 10_000, at=0.01) for _ in range(30)]
    done = drive(policy, [*short, *pages], took_s, 2)
    waits = sorted(done.starts_s[i.id] - i.arrived_s for i in short)
    assert waits[-1] <= QUANTUM_S
    runs = [(s, e) for s, e, b in done.batches if b.model == "page"]
    alone = [s for s, _ in runs if s > short[-1].arrived_s + 2.0]
    both = max(sum(1 for s, e in runs if s <= t < e) for t in alone)
    assert both == 2  # with no texts about, pages have the whole machine


def test_schedule_urgent_item_goes_first_but_debt_is_capped():
    """A near deadline overtakes, until its model is far ahead of its share."""
    policy = scheduler(["a", "b"])
    policy.add(item("a", 50, deadline_s=100.0), 0.0)
    policy.add(item("b", 50, deadline_s=0.1), 0.0)
    batch = policy.next_batch(0.0, 1, lambda _: "free")
    assert batch is not None
    assert batch.model == "b"
    assert policy.urgent_batches == 1
    always = scheduler(["a", "b"])
    arrivals = [item("a", 900) for _ in range(200)]
    arrivals += [item("b", 900, at=n * 0.09, deadline_s=n * 0.09 + 0.25) for n in range(200)]
    done = drive(always, arrivals, took_s, 1)
    device_s = done.device_s(lambda b: b.model, until_s=15.0)
    assert device_s["b"] - device_s["a"] <= MAX_DEBT_S + 2 * QUANTUM_S


def test_schedule_drops_what_cannot_be_done_in_time():
    """An item that would be late even alone never reaches a device."""
    policy = scheduler(["a"])
    policy.add(item(tokens=500, deadline_s=1.0), 0.9)  # 52 ms of work
    policy.add(item(tokens=500, deadline_s=1.0), 0.9)
    busy = lambda _: "busy"  # noqa: E731
    assert policy.expire(0.94, busy) == []
    assert len(policy.expire(0.96, busy)) == 2
    assert policy.next_batch(0.96, 1, lambda _: "free") is None


def test_schedule_nobody_saves_up_device_time():
    """A model that was idle for long does not then hold the device for as long."""
    policy = scheduler(["a", "b"])
    arrivals = [item("a", 900, at=n * 0.09) for n in range(300)]
    arrivals += [item("b", 900, at=13.0) for _ in range(100)]
    done = drive(policy, arrivals, took_s, 1)
    after = [b for s, e, b in done.batches if 13.1 < s < 15.1]
    assert sum(b.model == "a" for b in after) >= 0.4 * len(after)


def test_schedule_tenants_of_a_model_take_turns():
    """One tenant's thousand items do not stand before another's first."""
    policy = scheduler(["a"])
    arrivals = [item(tokens=100, tenant="big") for _ in range(1000)]
    late = item(tokens=100, at=0.05, tenant="small")
    done = drive(policy, [*arrivals, late], took_s, 1)
    assert done.starts_s[late.id] - 0.05 <= 2 * QUANTUM_S


def test_schedule_free_devices_share_the_backlog():
    """Two free devices get half of the waiting work each."""
    policy = scheduler(["a"], devices=2)
    for _ in range(8):
        policy.add(item(tokens=100), 0.0)
    sizes = [policy.next_batch(0.0, n, lambda _: "free").tokens for n in (2, 1)]
    assert sizes == [400, 400]


def test_schedule_only_runs_what_may_run():
    """A line whose model is not on any device is passed over."""
    policy = scheduler(["a", "b"])
    policy.add(item("a"), 0.0)
    policy.add(item("b", at=0.1), 0.1)
    batch = policy.next_batch(0.2, 1, lambda model: "free" if model == "b" else "absent")
    assert batch is not None
    assert batch.model == "b"
    assert policy.next_batch(0.2, 1, lambda model: "free" if model == "b" else "absent") is None


def test_schedule_learns_nothing_from_a_batch_that_was_refused():
    """What an item at fault took is charged, and says nothing of what its model costs."""
    policy = Scheduler(LANES, devices=1)
    cost = CostModel(CostState(LAUNCH_S, TOKEN_S))
    policy.add_model(ModelRule("a", 1.0, True, 1024, 100, 100_000), cost)
    for learn in (False, True):
        policy.add(item("a", 10_000), 0.0)
        batch = policy.next_batch(0.0, 1, lambda _: "free")
        before_s = cost.predict_s(batch.work)
        policy.finished(batch, 0.003, 0.003, learn=learn)
        assert (cost.predict_s(batch.work) < before_s) == learn


def test_schedule_a_lost_batch_is_not_charged():
    """What a crash took is taken off the account again."""
    policy = scheduler(["a", "b"])
    policy.add(item("a", 900), 0.0)
    policy.add(item("a", 900), 0.0)
    policy.add(item("b", 900, at=0.01), 0.01)
    lost = policy.next_batch(0.02, 1, lambda _: "free")
    assert lost is not None
    assert lost.model == "a"
    policy.finished(lost, None, 0.05)
    policy.remove([policy.window("b", "interactive").ids()[0]])
    policy.add(item("b", 900, at=0.05), 0.05)
    again = policy.next_batch(0.06, 1, lambda _: "free")
    assert again is not None
    assert again.model == "a"


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["fifo32", "window64", "buckets"]))
def test_baselines_serve_everything_once(seed, kind):
    """The policies that we compare with lose nothing either."""
    rng = random.Random(seed)
    arrivals = [item(rng.choice("ab"), rng.randint(1, 256), rng.uniform(0, 1)) for _ in range(200)]
    done = drive(BaselinePolicy(kind, max_items=1000), arrivals, took_s, 2)
    assert set(done.starts_s) == {i.id for i in arrivals}
    most = {"fifo32": 32, "window64": 64, "buckets": 1024}[kind]
    assert max(len(b.items) for _, _, b in done.batches) <= most


def test_schedule_worked_example():
    """The example of ARCHITECTURE.md, step by step."""
    policy = scheduler(["minilm", "other"], packing=False)
    for tokens in (30, 200, 28, 205, 32, 195, 31):
        assert policy.add(item("minilm", tokens), 0.0)
    assert policy.budget_tokens("minilm", "interactive") == 980
    first = policy.next_batch(0.0, 1, lambda _: "free")
    assert sorted(i.tokens for i in first.items) == [28, 30, 31, 32]
    assert first.work.padded_tokens == 128
    assert first.expected_s == pytest.approx(0.015, abs=0.001)
    assert first.tokens / first.work.padded_tokens == pytest.approx(0.95, abs=0.01)
    for _ in range(2):
        policy.add(item("other", 20, at=0.01), 0.01)
    policy.finished(first, first.expected_s, 0.015)
    second = policy.next_batch(0.015, 1, lambda _: "free")
    assert sorted(i.tokens for i in second.items) == [195, 200, 205]
    assert second.work.padded_tokens == 615
    policy.finished(second, second.expected_s, 0.08)
    third = policy.next_batch(0.08, 1, lambda _: "free")
    assert third.model == "other"


def test_lanes_parse_reads_the_setting_and_names_what_is_wrong():
    """The default is readable; a wrong rule is an error that shows the right form."""
    rules = parse_lanes(DEFAULT_LANES)
    assert [r.name for r in rules] == ["interactive", "bulk"]
    assert rules[1] == LaneRule("bulk", 2.0, 0.4, 5.0)
    for text in ("fast", "a:1:100ms:1s,a:1:100ms:1s", "a:0:100ms:1s", "A:1:1ms:1s", ""):
        with pytest.raises(SettingsError, match="lanes"):
            parse_lanes(text)
