"""Several workers share out the models of a pool: real processes, a real broker."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from tests.support.fleet import Fleet
from tests.support.pace import limit_s

FLAGS = ("--ack-wait-s", "1")
MODELS = {f"m{n}": "{load_s: 0.5}" for n in range(5)} | {
    "hot": "{load_s: 0.3, sleep_s: 0.1}\nprofile: {max_batch_tokens: 4}",
    "taken": "{load_s: 0.3}",
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Three workers of one device each."""
    fleet = Fleet(tmp_path_factory.mktemp("pool"), *FLAGS, workers=3, models=MODELS)
    yield fleet
    fleet.close()


def embed(pool, model, text="hello"):
    url = f"http://127.0.0.1:{pool.ports[0]}/v1/encode"
    headers = {"x-shoal-deadline-ms": "20000"}
    return httpx.post(
        url, json={"model": model, "inputs": [text]}, headers=headers, timeout=limit_s(60)
    )


def burst(pool, model, n):
    """Sends n requests at once; their status codes."""
    codes = []
    threads = [
        threading.Thread(target=lambda i=i: codes.append(embed(pool, model, f"{i}").status_code))
        for i in range(n)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return codes


def loads(pool, model):
    """How often each worker has loaded a model."""
    return [worker.output.count(f"loaded {model}@1") for worker in pool.workers]


def settled(pool, model, copies, within_s=10.0):
    """Waits until a model has so many copies; how many it has in the end."""
    give_up = time.monotonic() + limit_s(within_s)
    while sum(loads(pool, model)) < copies and time.monotonic() < give_up:
        time.sleep(0.05)
    return sum(loads(pool, model))


def test_pool_loads_a_cold_model_once_for_a_burst(pool):
    """A burst for a cold model is one load on one of three workers, and all of it is answered."""
    time.sleep(1.5)  # the workers have heard of one another
    for n in range(3):
        assert burst(pool, f"m{n}", 20) == [200] * 20
        assert sum(loads(pool, f"m{n}")) == 1


def test_pool_prefers_the_worker_that_has_the_model(pool):
    """Requests one after another stay where the model is; nobody else loads it."""
    for n in range(20):
        assert embed(pool, "m3", f"text {n}").status_code == 200
    assert sorted(loads(pool, "m3")) == [0, 0, 1]


def stream(pool, model, for_s, callers=48):
    """Callers who ask again and again for a while; the threads, and the status codes so far."""
    stop, codes = time.monotonic() + for_s, []

    def send(i):
        while time.monotonic() < stop:
            codes.append(embed(pool, model, f"{i}").status_code)

    threads = [threading.Thread(target=send, args=(i,)) for i in range(callers)]
    for thread in threads:
        thread.start()
    return threads, codes


def test_pool_gives_a_hot_model_more_copies(pool):
    """When what waits takes longer than a load, another worker loads the model, too."""
    before = loads(pool, "hot")
    threads, codes = stream(pool, "hot", 6.0)
    for thread in threads:
        thread.join()
    assert set(codes) == {200}
    assert settled(pool, "hot", 2) >= 2
    assert max(now - n for now, n in zip(loads(pool, "hot"), before, strict=True)) <= 1


def test_pool_serves_what_a_killed_runtime_left(pool):
    """Items in the hands of a worker whose runtime died go to the one that has the model."""
    threads, codes = stream(pool, "hot", 4.0)
    time.sleep(1.5)
    (owner, *_) = [i for i, n in enumerate(loads(pool, "hot")) if n]
    pool.kill_runtime(owner)
    for thread in threads:
        thread.join()
    assert set(codes) == {200}


def test_pool_takes_over_the_models_of_a_dead_worker(pool):
    """A model whose only worker was killed is loaded by another as soon as it is asked for."""
    assert embed(pool, "taken").status_code == 200
    (owner,) = [i for i, n in enumerate(loads(pool, "taken")) if n]
    pool.end_worker(owner)
    assert embed(pool, "taken").status_code == 200
    assert sum(n for i, n in enumerate(loads(pool, "taken")) if i != owner) == 1
    pool.start_worker(owner)
