"""The residency simulation: it checks itself, and what it shows of the policies."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.residency import Memory
from shoal.core.residency_plan import MOST_STAY_S, ResidencyPlanner
from shoal.core.residency_rank import RANKINGS, Known, make_ranking
from shoal.sim.residency import Machine, ResidencySimulation, quantile
from shoal.sim.workload import Arrival, Popularity, SimModel, random_models


def simulate(name, models, arrivals, budget, *, devices=1, **machine):
    times = defaultdict(list)
    for arrival in arrivals:
        times[arrival.model].append(arrival.at_s)
    sizes = {m.model: m.size_bytes for m in models}
    known = Known(sizes, budget, Counter(a.model for a in arrivals), times)
    memories = tuple(Memory(f"gpu{n}", budget, 0, (f"gpu{n}",)) for n in range(devices))
    policy = ResidencyPlanner(make_ranking(name, known))
    return ResidencySimulation(Machine(memories, **machine), models, policy).run(arrivals)


def most_in_memory(report, models):
    """The largest sum of the sizes of what is in a device's memory at one moment."""
    sizes = {m.model: m.size_bytes for m in models}
    changes = [(s.to_s, 0, s.device, -sizes[s.model]) for s in report.stays]
    changes += [(s.from_s, 1, s.device, sizes[s.model]) for s in report.stays]
    used, most = Counter(), 0
    for _, _, device, size in sorted(changes):
        used[device] += size
        most = max(most, used[device])
    return most


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(RANKINGS), st.integers(1, 2), st.booleans())
def test_sim_serves_everything_within_the_budget(seed, name, devices, hurried):
    """Whatever the policy, each request is served once, and memory is never over its budget."""
    rng = random.Random(seed)
    models = random_models(8, rng)
    arrivals = Popularity(0.9, rng.uniform(0.5, 8.0), 0.4, 1.0).trace(
        [m.model for m in models], rng
    )
    budget = max(m.size_bytes for m in models) + rng.randrange(10**9)
    deadline_s = 5.0 if hurried else None
    report = simulate(name, models, arrivals, budget, devices=devices, deadline_s=deadline_s)
    assert report.served == len(arrivals)
    assert report.unserved == 0
    assert most_in_memory(report, models) <= budget
    assert report.loads == len(report.stays)


@pytest.mark.parametrize("name", RANKINGS)
def test_sim_with_memory_for_all_loads_each_once(name):
    """Where all fits, each model that is asked for loads exactly once, and nothing ever goes."""
    rng = random.Random(1)
    models = random_models(10, rng)
    arrivals = Popularity(0.9, 5.0, 1.0).trace([m.model for m in models], rng)
    report = simulate(name, models, arrivals, sum(m.size_bytes for m in models))
    asked = {arrival.model for arrival in arrivals}
    assert report.loads == len(asked)
    expected_s = sum(m.load_s for m in models if m.model in asked)
    assert report.load_s == pytest.approx(expected_s)


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(RANKINGS))
def test_sim_no_model_starves_beside_busy_ones(seed, name):
    """On memory for about one, beside models that always have work, the rarest is soon loaded."""
    rng = random.Random(seed)
    models = [SimModel(f"hot{n}", 50 + rng.randrange(50), 0.5) for n in range(3)]
    models.append(SimModel("rare", 100, rng.uniform(0.2, 2.0)))
    hot = [Arrival(n * 0.02, f"hot{rng.randrange(3)}") for n in range(3000)]
    arrivals = sorted([*hot, Arrival(20.0, "rare")], key=lambda arrival: arrival.at_s)
    report = simulate(name, models, arrivals, 100)
    loaded = next(s for s in report.stays if s.model == "rare")
    assert loaded.from_s - 20.0 <= len(models) * MOST_STAY_S / 2


def test_sim_a_b_a_c_b_does_not_thrash():
    """A B A C B on memory for two: the one asked for most stays, and fewer loads than with LRU."""
    models = [SimModel(name, 50, 1.0) for name in "ABC"]
    arrivals = [Arrival(10.0 * n, "ABACB"[n % 5]) for n in range(200)]
    ours = simulate("density", models, arrivals, 100)
    lru = simulate("lru", models, arrivals, 100)
    assert ours.loads <= 0.75 * lru.loads
    assert ours.served == lru.served == 200
    assert min(ours.resident_share(name) for name in "AB") > 0.5


def test_sim_a_b_a_c_b_in_a_hurry_stays_with_a_model():
    """The same as fast as it goes: loads have at most half of the time."""
    models = [SimModel(name, 50, 1.0) for name in "ABC"]
    arrivals = [Arrival(0.05 * n, "ABACB"[n % 5]) for n in range(1200)]
    report = simulate("density", models, arrivals, 100)
    assert report.served == 1200
    assert report.load_s <= report.end_s / 2 + 1.0  # the last load has had no rest yet


@pytest.mark.slow
def test_sim_density_loads_clearly_less_than_lru():
    """60 models, Zipf 0.9, memory for half, drift: about a quarter less load time than LRU."""
    ratios = []
    for seed in range(2):
        rng = random.Random(seed)
        models = random_models(60, rng)
        arrivals = Popularity(0.9, 2.0, 12.0, 0.02).trace([m.model for m in models], rng)
        budget = sum(m.size_bytes for m in models) // 2
        ours, lru = (simulate(name, models, arrivals, budget) for name in ("density", "lru"))
        ratios.append(ours.load_s / lru.load_s)
    assert sum(ratios) / len(ratios) < 0.8


def test_workload_follows_its_seed_and_its_exponent():
    """The same seed is the same trace; the first of Zipf 1 is asked for twice as the second."""
    names = [f"m{n}" for n in range(5)]
    traffic = Popularity(1.0, 100.0, 2.0)
    first, again = (traffic.trace(names, random.Random(3)) for _ in range(2))
    assert first == again
    assert len(first) == pytest.approx(12_000, rel=0.05)
    (_, most), (_, second), *_ = Counter(a.model for a in first).most_common()
    assert most / second == pytest.approx(2.0, rel=0.15)


def test_quantile_is_the_nearest_rank():
    """The quantile of numbers in any order is one of them; of none it is 0."""
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([], 0.95) == 0.0
