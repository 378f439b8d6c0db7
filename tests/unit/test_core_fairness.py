"""The scheduler's shares and bounds under traffic that tries to break them, on a mock clock."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.core.cost import CostModel, CostState
from shoal.core.lanes import LaneRule
from shoal.core.line import ModelRule
from shoal.core.schedule import FIT_QUANTA, Scheduler
from shoal.core.turns import MAX_DEBT_S
from shoal.core.types import Item
from tests.support.policy_drive import drive

LAUNCH_S, TOKEN_S, QUANTUM_S = 0.002, 1e-4, 0.1
FULL = 900  # tokens of an item that takes about a quantum, and runs alone
FULL_S = LAUNCH_S + TOKEN_S * FULL
LANES = (LaneRule("interactive", 8.0, QUANTUM_S, 1.0), LaneRule("bulk", 2.0, 0.4, 5.0))
_serial = iter(range(10**9))


class KnownCost(CostModel):
    """A cost model of a device that is known exactly and never changes."""

    def observe(self, work, took_s):
        pass


def took_s(batch):
    return LAUNCH_S + TOKEN_S * batch.work.padded_tokens


def scheduler(models, *, devices=1, weights=None):
    made = Scheduler(LANES, devices=devices)
    for model in models:
        rule = ModelRule(model, (weights or {}).get(model, 1.0), True, 1024, 100_000, 100_000)
        made.add_model(rule, KnownCost(CostState(LAUNCH_S, TOKEN_S, factor=1.0)))
    return made


def item(model, at, tokens=FULL, lane="interactive", *, within_s=1e9, tenant="", call=""):
    name = f"{model}{next(_serial)}"
    return Item(name, model, lane, (tokens,), at + within_s, at, tenant, request=call)


def stream(model, from_s, to_s, every_s, **more):
    count = int((to_s - from_s) / every_s)
    return [item(model, from_s + n * every_s, **more) for n in range(count)]


def waits_s(done, items):
    return [done.starts_s[one.id] - one.arrived_s for one in items if one.id in done.starts_s]


@pytest.mark.parametrize("load", [0.1, 0.3, 0.5])
def test_schedule_part_load_is_not_held_against_a_model(load):
    """Ten minutes alone at part load, then another's burst: the steady model goes on as before.

    Nothing expires, and its worst wait is the batch that runs and two of the other's.
    """
    policy = scheduler("ab")
    steady = stream("a", 0.0, 640.0, FULL_S / load, within_s=10.0)
    burst = [item("b", 600.0) for _ in range(400)]
    done = drive(policy, [*steady, *burst], took_s, 1)
    assert done.expired == []
    assert max(waits_s(done, steady)) <= 3 * QUANTUM_S


def test_schedule_part_load_is_not_held_against_a_lane():
    """Ten minutes of interactive work at half load, then bulk: it has all that it asks for."""
    policy = scheduler("ab")
    steady = stream("a", 0.0, 640.0, FULL_S / 0.5, within_s=10.0)
    bulk = [item("b", 600.0, lane="bulk") for _ in range(400)]
    done = drive(policy, [*steady, *bulk], took_s, 1)
    assert done.expired == []
    assert max(waits_s(done, steady)) <= 3 * QUANTUM_S


def test_schedule_urgent_bulk_lends_no_more_than_its_bound():
    """Bulk work with near deadlines never gets more than its share and what may be lent."""
    policy = scheduler("ab")
    work = [item("a", 0.0) for _ in range(400)]
    bulk = stream("b", 0.0, 30.0, FULL_S, lane="bulk", within_s=0.45)
    done = drive(policy, [*work, *bulk], took_s, 1)
    for until_s in (5.0, 10.0, 20.0, 30.0):
        had_s = done.device_s(lambda b: b.lane, until_s=until_s)
        assert had_s["bulk"] <= 0.2 * until_s + MAX_DEBT_S + 2 * QUANTUM_S
        assert had_s["interactive"] >= 0.8 * until_s - MAX_DEBT_S - 2 * QUANTUM_S


def test_schedule_interactive_deadlines_count_beside_bulk_of_any_history():
    """However much the lanes have had, an urgent item goes before what can wait."""
    policy = scheduler("abc")
    before = [item("a", 0.0) for _ in range(200)] + [item("b", 0.0, lane="bulk") for _ in range(50)]
    rest = [item("a", 30.0) for _ in range(20)]
    urgent = item("c", 30.01, within_s=0.35)
    done = drive(policy, [*before, *rest, urgent], took_s, 1)
    assert done.starts_s[urgent.id] + FULL_S <= urgent.deadline_s


@pytest.mark.parametrize("packing", [True, False])
def test_schedule_near_deadlines_of_a_tenant_do_not_starve_another(packing):
    """Beside a tenant whose every item is urgent, another of the same model gets its turns."""
    policy = Scheduler(LANES, devices=1)
    rule = ModelRule("a", 1.0, packing, 1024, 100_000, 100_000)
    policy.add_model(rule, KnownCost(CostState(LAUNCH_S, TOKEN_S, factor=1.0)))
    hasty = stream("a", 0.0, 60.0, 0.03, tokens=300, within_s=0.25, tenant="hasty")
    other = stream("a", 1.0, 60.0, 1.0, tokens=350, tenant="other")
    done = drive(policy, [*hasty, *other], took_s, 1)
    assert max(waits_s(done, other)) <= 5 * QUANTUM_S


def test_schedule_tenants_save_nothing_up():
    """A tenant that was alone for a while goes on beside one that comes with a burst."""
    policy = scheduler("a")
    steady = stream("a", 0.0, 70.0, FULL_S / 0.4, tenant="steady")
    burst = [item("a", 60.0, tenant="burst") for _ in range(100)]
    done = drive(policy, [*steady, *burst], took_s, 1)
    assert max(waits_s(done, steady)) <= 3 * QUANTUM_S


@pytest.mark.parametrize("packing", [True, False])
def test_schedule_small_calls_beside_a_large_one_wait_for_no_more_than_the_batch_that_runs(packing):
    """Of one tenant: what comes alone goes with the next batch, whatever the large call has here.

    The large call goes on at nearly its full rate.
    """
    policy = Scheduler(LANES, devices=1)
    rule = ModelRule("a", 1.0, packing, 1024, 100_000, 100_000)
    policy.add_model(rule, KnownCost(CostState(LAUNCH_S, TOKEN_S, factor=1.0)))
    rng = random.Random(1)
    large = [item("a", 0.0, rng.randint(20, 300), call="large") for _ in range(2_000)]
    small = [
        item("a", at_s / 100, rng.randint(20, 100), call=f"small{at_s}")
        for at_s in range(10, 1_500, 7)
    ]
    done = drive(policy, [*large, *small], took_s, 1)
    assert max(waits_s(done, small)) <= QUANTUM_S + 2 * LAUNCH_S
    useful_s = TOKEN_S * sum(one.tokens for one in [*large, *small])
    assert done.batches[-1][1] <= 1.1 * useful_s


def test_schedule_ever_new_calls_do_not_keep_a_large_one_waiting():
    """Small calls come faster than they can be served: the large one still has its share."""
    policy = scheduler("a")
    large = [item("a", 0.0, 100, call="large") for _ in range(200)]
    small = stream("a", 0.0, 20.0, 0.004, tokens=60)
    small = [replace(one, request=f"small{n}") for n, one in enumerate(small)]
    done = drive(policy, [*large, *small], took_s, 1)
    ends_s = max(done.starts_s[one.id] for one in large)
    assert ends_s < max(done.starts_s[one.id] for one in small)
    assert sum(done.starts_s[one.id] < 10.0 for one in large) > 20


def test_schedule_work_of_an_absent_model_holds_nobody_up():
    """Short work that cannot run here caps no long work: both devices are used in full quanta."""
    policy = scheduler("ab", devices=2)
    cold = [item("b", 0.0, tokens=20, within_s=30.0)]
    bulk = [item("a", 0.0, tokens=100, lane="bulk") for _ in range(2000)]
    done = drive(policy, [*cold, *bulk], took_s, 2, absent={"b"})
    runs = [(start, end) for start, end, _ in done.batches]
    assert sum(1 for start, _ in runs if start == 0.0) == 2
    assert runs[0][1] > 0.3
    assert [one.id for _, one in done.expired] == [cold[0].id]
    assert done.expired[0][0] >= 30.0


def test_schedule_idle_device_tries_what_seems_hopeless():
    """An estimate a hundred times too high: everything runs, in time, for nothing else would."""
    policy = Scheduler(LANES, devices=1)
    cost = CostModel(CostState(100 * LAUNCH_S, 100 * TOKEN_S, floor_s=5.0, batches=100))
    policy.add_model(ModelRule("a", 1.0, True, 1024, 1000, 100_000), cost)
    work = stream("a", 0.0, 60.0, 0.5, within_s=1.0)
    done = drive(policy, work, took_s, 1)
    assert done.expired == []
    assert cost.predict_s(done.batches[-1][2].work) < 3 * FULL_S


def test_schedule_hopeless_work_goes_after_what_can_be_in_time():
    """It runs only where nothing else can, and is dropped while the devices are busy."""
    policy = scheduler("ab")
    hopeless = item("a", 0.0, within_s=0.05)
    good = item("b", 0.0)
    done = drive(policy, [hopeless, good], took_s, 1)
    assert done.starts_s == {good.id: 0.0}
    assert [one.id for _, one in done.expired] == [hopeless.id]


@pytest.mark.parametrize("slower", [1, 5, 20])
def test_schedule_quantum_fits_a_slow_device(slower):
    """On any device work runs at 0.9 of the best rate, and waits are bounded by the fitted quantum.

    There the launch alone may take 40 ms of a quantum of 100 ms.
    """
    launch_s, token_s = LAUNCH_S * slower, TOKEN_S * slower
    quantum_s = max(QUANTUM_S, 20 * launch_s)

    def took_s(batch):
        return launch_s + token_s * batch.work.padded_tokens

    policy = Scheduler(LANES, devices=1)
    for model in "ab":
        cost = KnownCost(CostState(launch_s, token_s, factor=1.0, batches=100))
        policy.add_model(ModelRule(model, 1.0, True, 1024, 100_000, 100_000), cost)
    crowd = [item("a", 0.0, tokens=10) for _ in range(8_000 // slower)]
    bulk = [item("a", 0.0, tokens=10, lane="bulk") for _ in range(1_000 // slower)]
    single = stream("b", 0.5, 6.0, 6 * quantum_s, tokens=10)
    done = drive(policy, [*crowd, *bulk, *single], took_s, 1)
    assert max(waits_s(done, single)) <= 3 * quantum_s
    full = [(end - start, b.tokens) for start, end, b in done.batches if b.model == "a"][:-2]
    assert sum(n for _, n in full) * token_s >= 0.9 * sum(s for s, _ in full)


def test_schedule_quantum_that_fits_is_bounded():
    """An estimate of a launch of minutes makes no batch longer than `FIT_QUANTA` quanta."""
    policy = Scheduler(LANES, devices=1)
    cost = KnownCost(CostState(60.0, TOKEN_S, factor=1.0, batches=100))
    policy.add_model(ModelRule("a", 1.0, True, 1024, 100_000, 10**9), cost)
    for lane in ("interactive", "bulk"):
        longest = CostModel(CostState(0.0, TOKEN_S)).budget_tokens(FIT_QUANTA * QUANTUM_S, 64)
        assert policy.budget_tokens("a", lane) <= longest


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n_models=st.integers(2, 6),
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=6, max_size=6),
)
@example(seed=0, n_models=2, weights=[4.0, 0.5, 1.0, 1.0, 1.0, 1.0])
def test_schedule_share_theorem(seed, n_models, weights):
    """Two lines of a lane that always have work: each within two quanta of its share, always.

    Theorem "share" of ARCHITECTURE.md, on one device, over any interval, whatever others do.
    """
    rng = random.Random(seed)
    models = [f"m{n}" for n in range(n_models)]
    policy = scheduler(models, weights=dict(zip(models, weights, strict=False)))
    always = models[:2]
    arrivals = [item(m, 0.0, rng.choice([200, 450, FULL])) for m in always for _ in range(600)]
    for model in models[2:]:  # the others burst, sleep, and trickle
        at = 0.0
        while at < 30.0:
            at += rng.choice([0.01, 0.2, 3.0])
            arrivals += [item(model, at, rng.randint(20, FULL)) for _ in range(rng.choice([1, 20]))]
    done = drive(policy, arrivals, took_s, 1)
    left = defaultdict(int)
    for one in arrivals:
        left[one.model] += 1
    got = [(0.0, 0.0)]
    totals = dict.fromkeys(always, 0.0)
    for start_s, end_s, batch in sorted(done.batches, key=lambda run: run[0]):
        left[batch.model] -= len(batch.items)
        if batch.model in totals:
            totals[batch.model] += end_s - start_s
            if not left[batch.model]:
                break
            a, b = (totals[m] / w for m, w in zip(always, weights, strict=False))
            got.append((a, b))
    ahead = [a - b for a, b in got]
    bound_s = sum(2 * QUANTUM_S / weight for weight in weights[:2])
    assert max(ahead) - min(ahead) <= bound_s + 1e-9


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), n_models=st.integers(1, 6), devices=st.integers(1, 4))
def test_schedule_wait_theorem(seed, n_models, devices):
    """A line with no more than a quantum of work starts within 2 + ceil(3 (M - 1) / W) quanta.

    Theorem "wait" of ARCHITECTURE.md: of M lines of equal weight on W devices, after any past.
    """
    rng = random.Random(seed)
    models = [f"m{n}" for n in range(n_models)]
    policy = scheduler(models, devices=devices)
    arrivals: list[Item] = []
    for model in models[1:]:  # any past: bursts after idle, part load, flips of popularity
        at = rng.uniform(0, 5)
        while at < 40.0:
            burst = rng.choice([1, 1, 1, 50])
            arrivals += [item(model, at, rng.randint(20, FULL)) for _ in range(burst)]
            at += rng.choice([0.05, 0.3, 5.0])
    bound_s = (2 + -(-3 * (n_models - 1) // devices)) * QUANTUM_S
    ours = []
    at = rng.uniform(0, 5)
    while at < 40.0:  # never more than one that waits or runs
        ours.append(item(models[0], at, FULL))
        at += bound_s + FULL_S + rng.choice([0.0, 0.1, 4.0])
    done = drive(policy, [*arrivals, *ours], took_s, devices)
    assert max(waits_s(done, ours)) <= bound_s + 1e-9
