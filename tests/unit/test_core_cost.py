"""The cost model learns what devices do, and does not believe outliers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.cost import CostModel, CostState, Work

GUESS = CostState(0.005, 1e-4)


def truth(work, floor_s=0.004, a=0.002, b=1.4e-4, c=2e-8):
    return max(floor_s, a + b * work.padded_tokens + c * work.squares)


def random_work(rng):
    length, count = rng.choice([8, 16, 32, 64, 128, 256]), rng.randint(1, 40)
    return Work.of_blocks([[length] * count])


def trained(seed=0, batches=300, noise=0.05, outliers=0.0, start=GUESS):
    rng, model = random.Random(seed), CostModel(start)
    for _ in range(batches):
        work = random_work(rng)
        slow = 20.0 if rng.random() < outliers else 1.0
        model.observe(work, truth(work) * slow * rng.lognormvariate(0, noise))
    return model


def error(model, seed=1):
    rng = random.Random(seed)
    works = [random_work(rng) for _ in range(100)]
    errors = sorted(abs(model.predict_s(w) / truth(w) - 1) for w in works)
    return errors[50], errors[90]


@pytest.mark.parametrize("seed", range(5))
def test_cost_model_learns_a_noisy_device(seed):
    """After a few hundred batches the median error is small, and large ones are rare."""
    middle, high = error(trained(seed))
    assert middle < 0.03
    assert high < 0.06


@pytest.mark.parametrize("seed", range(5))
def test_cost_model_does_not_believe_outliers(seed):
    """One batch in thirty takes twenty times as long: the curve stays where it was."""
    middle, _ = error(trained(seed, outliers=1 / 30))
    assert middle < 0.03


@pytest.mark.parametrize("factor", [0.01, 0.1, 10.0, 100.0])
def test_cost_model_drops_an_estimate_that_batches_contradict(factor):
    """A stored state that is wrong as a whole, however sure it was: a dozen batches mend it."""
    wrong = CostState(0.002 * factor, 1.4e-4 * factor, 0.0, 0.004 * factor, batches=10_000)
    rng, model = random.Random(1), CostModel(wrong)
    for _ in range(12):
        work = random_work(rng)
        model.observe(work, truth(work))
    middle, _ = error(model)
    assert middle < 0.15


def test_cost_model_outlives_a_device_that_stands_still():
    """One batch of two seconds among the first, or later, moves the next prediction little."""
    for before in (0, 1, 3, 100):
        rng, model = random.Random(before), trained(before, batches=before)
        model.observe(random_work(rng), 2.0)
        for _ in range(2):
            work = random_work(rng)
            model.observe(work, truth(work))
        work = Work.of_blocks([[64] * 8])
        assert model.predict_s(work) < 3 * truth(work)


def test_cost_model_bound_holds_for_most_batches():
    """The bound for deadlines is above about 95 of 100 batches."""
    rng, model = random.Random(3), trained(2, batches=600, noise=0.3)
    above = 0
    for _ in range(600):
        work = random_work(rng)
        took_s = truth(work) * rng.lognormvariate(0, 0.3)
        above += took_s > model.bound_s(work)
        model.observe(work, took_s)
    assert 0.01 < above / 600 < 0.12


def test_cost_model_follows_a_device_that_becomes_slower():
    """Forgetting: a device at half its speed is known after some tens of batches."""
    rng, model = random.Random(4), trained(4)
    for _ in range(150):
        work = random_work(rng)
        model.observe(work, 2 * truth(work))
    work = Work.of_blocks([[64] * 16])
    assert model.predict_s(work) == pytest.approx(2 * truth(work), rel=0.2)


def test_cost_model_survives_a_restart_as_an_estimate():
    """Started from its state, a model predicts what it predicted."""
    model = trained()
    again = CostModel(model.state())
    work = Work.of_blocks([[40] * 20])
    assert again.predict_s(work) == pytest.approx(model.predict_s(work), rel=1e-6)
    assert again.bound_s(work) == pytest.approx(model.bound_s(work), rel=1e-6)


def test_cost_model_budget_is_what_fits():
    """A batch of the budget takes the time that was allowed."""
    model = trained()
    tokens = model.budget_tokens(0.1, 64)
    assert truth(Work(tokens, tokens * 64)) == pytest.approx(0.1, rel=0.15)
    free = model.budget_tokens(0.0, 64)  # no batch is shorter than the floor
    assert model.predict_s(Work(free, free * 64)) == pytest.approx(model.state().floor_s, rel=0.05)


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(1, 5000), st.integers(1, 512), st.floats(1e-6, 10)),
        max_size=60,
    )
)
def test_cost_model_never_predicts_nonsense(batches):
    """Whatever is observed, predictions are positive, finite and grow with the work."""
    model = CostModel(GUESS)
    for tokens, length, took_s in batches:
        model.observe(Work(tokens, tokens * length), took_s)
    small, large = Work(100, 10_000), Work(1000, 100_000)
    assert 0 < model.predict_s(small) <= model.predict_s(large) < 1e6
    assert model.bound_s(small) >= model.predict_s(small)
