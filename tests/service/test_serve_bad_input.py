"""Every wrong request of the table, against real models behind the real queue."""

from __future__ import annotations

import threading

import httpx

from shoal.settings import GatewaySettings
from tests.support.bad_requests import bad_requests
from tests.support.pace import limit_s

MODEL = "all-minilm-l6-v2"
TABLE = bad_requests(
    MODEL,
    GatewaySettings(),
    pair_classifier="splade-tiny",
    images="efficientnet-lite0",
    sounds="whisper-tiny-en",
)


def test_serve_bad_input_is_refused_while_neighbours_are_served(live_server):
    """Each gets its clear 4xx; meanwhile another caller's good requests all succeed."""
    statuses, done = [], threading.Event()

    def neighbour():
        with httpx.Client(base_url=live_server, timeout=limit_s(60)) as client:
            while not done.is_set() or len(statuses) < 20:
                body = {"model": MODEL, "inputs": ["a good neighbour"]}
                statuses.append(client.post("/v1/encode", json=body).status_code)

    thread = threading.Thread(target=neighbour)
    thread.start()
    faults = []
    with httpx.Client(base_url=live_server, timeout=limit_s(60)) as client:
        for bad in TABLE:
            try:
                bad.check(bad.send(client))
            except AssertionError as error:
                faults.append(f"{bad.name}: {error}")
        done.set()
        thread.join()
        assert not faults, "\n".join(faults)
        assert set(statuses) == {200}
        assert client.get("/readyz").status_code == 200


def test_serve_bad_input_odd_characters_pass_through(live_server):
    """NUL, emoji, right-to-left text and a word of thousands of letters are inputs like others."""
    inputs = ["a\0b", "🐟" * 20, "שלום", "x" * 4000, " ", "\n"]
    with httpx.Client(base_url=live_server, timeout=limit_s(60)) as client:
        answer = client.post("/v1/encode", json={"model": MODEL, "inputs": inputs})
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["dense"]) == len(inputs)
