"""What heartbeats say together."""

from __future__ import annotations

import pytest

from shoal.gateway.fleet import Fleet, Rates
from shoal.wire.envelope import ModelState, Status, encode


class Heard:
    def __init__(self):
        self.now = 0.0
        self.fleet = Fleet(lambda: self.now)

    def hear(self, worker, devices=1, draining=False, state="resident", **rates):
        model = ModelState("a", state, **rates)
        status = Status(worker, [model], devices=devices, draining=draining)
        self.fleet.on_status(encode(status))


def test_fleet_adds_devices_and_speeds():
    """Three devices of 10 ms a token and one of 2 ms do 800 tokens a second: 5 ms each of four."""
    heard = Heard()
    heard.hear("slow", devices=3, token_s=0.010, bytes_per_token=3.0)
    heard.hear("fast", devices=1, token_s=0.002, bytes_per_token=5.0)
    assert heard.fleet.devices == 4
    rates = heard.fleet.rates("a")
    assert rates.token_s == pytest.approx(4 / 800)
    assert rates.bytes_per_token == pytest.approx(3.5)


def test_fleet_leaves_out_who_knows_nothing_or_takes_nothing():
    """Workers that have not measured, cannot serve, or drain, do not bend the rates."""
    heard = Heard()
    assert heard.fleet.rates("a") == Rates()
    heard.hear("new", devices=2)
    heard.hear("broken", state="unavailable", token_s=9.0)
    heard.hear("leaving", devices=8, draining=True, token_s=9.0)
    heard.hear("good", token_s=0.25)
    assert heard.fleet.devices == 4
    assert heard.fleet.rates("a") == Rates(0.25, 0.0)
    assert heard.fleet.rates("unknown") == Rates()


def test_fleet_rates_follow_the_heartbeats():
    """News counts within the second, and a worker that fell silent does not count any more."""
    heard = Heard()
    heard.hear("one", token_s=0.5)
    heard.hear("two", devices=2, token_s=0.5)
    assert (heard.fleet.devices, heard.fleet.rates("a").token_s) == (3, 0.5)
    heard.now = 1.0
    heard.hear("one", token_s=0.1)
    assert heard.fleet.rates("a").token_s == pytest.approx(3 / (1 / 0.1 + 2 / 0.5))
    heard.now = 5.5
    assert (heard.fleet.devices, heard.fleet.rates("a").token_s) == (1, 0.1)
    heard.now = 6.5
    assert (heard.fleet.devices, heard.fleet.rates("a")) == (0, Rates())


def test_fleet_best_state_of_a_model_is_that_which_serves_soonest():
    """A resident copy is better than a loading one, and of two loads the one that ends first."""
    heard = Heard()
    heard.hear("cold", state="cold")
    heard.hear("late", state="loading", load_s=9.0, loading_s=1.0)
    heard.hear("soon", state="loading", load_s=9.0, loading_s=6.0)
    assert heard.fleet.model_states()["a"].loading_s == 6.0
    heard.hear("there", memory_bytes=5)
    assert heard.fleet.model_states()["a"].memory_bytes == 5
