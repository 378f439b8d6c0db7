"""A fleet on one machine with memory for a few of its models: real processes, a real broker.

The models are null models that really hold memory. What is checked is what a user sees, and what
the runtime processes hold.
"""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from tests.support.pace import limit_s
from tests.support.shoal_process import Serve

MODEL_MIB = 60
BASE_MIB = 130  # of an empty runtime process, generously


def null(**options):
    text = ", ".join(f"{key}: {value}" for key, value in options.items())
    return f"{{{text}}}"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """Six models of 60 MiB on one device with memory for three, and some that fail to load."""
    models = {f"m{n}": null(mib=MODEL_MIB, load_s=0.2) for n in range(6)}
    models |= {
        "huge": null(mib=8),
        "slow": null(mib=8, load_s=4.0),
        "oom-once": null(mib=8, load_fails="'oom:1'"),
        "broken": null(load_fails="config"),
    }
    folder = tmp_path_factory.mktemp("fleet")
    serve = Serve(
        folder,
        *("--devices", "cpu:1", "--memory-mib", str(BASE_MIB + 3 * MODEL_MIB + 20)),
        models=models,
    )
    yield serve
    serve.leave()


def embed(serve, model, text="hello", deadline_ms=20_000):
    return httpx.post(
        f"{serve.url}/v1/encode",
        json={"model": model, "inputs": [text]},
        headers={"x-shoal-deadline-ms": str(deadline_ms)},
        timeout=limit_s(60),
    )


def held_mib(serve):
    return sum(p.memory_info().rss for p in serve.children("shoal.runtimes.host")) / 2**20


def test_fleet_serves_more_models_than_fit(fleet):
    """Every model is loaded on first use, in place of another, and within the budget.

    One load more than that may be under way when it is measured.
    """
    for _ in range(2):
        for n in range(6):
            assert embed(fleet, f"m{n}").status_code == 200
            assert held_mib(fleet) < BASE_MIB + 4 * MODEL_MIB
    assert fleet.output.count("evicted m") >= 3


def test_fleet_waits_for_a_cold_model_and_says_how_long(fleet):
    """Who cannot wait for a load gets 503 `model_loading` and a time to come back.

    Who can wait is served.
    """
    early = embed(fleet, "slow", deadline_ms=1_000)
    assert (early.status_code, early.json()["code"]) == (503, "model_loading")
    assert int(early.headers["retry-after"]) >= 1
    served = embed(fleet, "slow")
    assert served.status_code == 200


def test_fleet_loads_once_for_a_burst(fleet):
    """Forty requests at once for a cold model are one load."""
    before = fleet.output.count("loaded m5@1")
    for n in range(3):
        embed(fleet, f"m{n}")  # m5 makes room
    answers = []
    threads = [
        threading.Thread(target=lambda n=n: answers.append(embed(fleet, "m5", f"text {n}")))
        for n in range(40)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [a.status_code for a in answers] == [200] * 40
    assert fleet.output.count("loaded m5@1") - before <= 1


def test_fleet_tries_again_after_a_load_that_did_not_fit(fleet):
    """Out of memory at a load is tried again with more room, and the request is served."""
    answer = embed(fleet, "oom-once")
    assert answer.status_code == 200, (answer.text, fleet.output)


def test_fleet_says_at_once_why_a_model_cannot_be_loaded(fleet):
    """A model with broken weights is a clear 503 long before the deadline; its neighbours serve."""
    begun_s = time.monotonic()
    answer = embed(fleet, "broken")
    assert answer.status_code == 503
    assert "broken" in answer.json()["message"]
    assert time.monotonic() - begun_s < limit_s(10)
    assert embed(fleet, "m1").status_code == 200


def test_fleet_does_not_thrash(fleet):
    """A B A C B in turn, many at once: loads stay far below requests."""
    before = fleet.output.count("loaded m")
    order = ["m0", "m1", "m0", "m2", "m1", "m3", "m0", "m1", "m2", "m4"] * 6
    answers = []

    def send(part):
        answers.extend(embed(fleet, model).status_code for model in part)

    threads = [threading.Thread(target=send, args=(order[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 60
    assert fleet.output.count("loaded m") - before < 30
