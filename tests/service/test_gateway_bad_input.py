"""Every wrong request of the table, over a real socket."""

from __future__ import annotations

import httpx
import pytest

from shoal.settings import GatewaySettings
from tests.support.bad_requests import bad_requests
from tests.support.gateway_server import gateway_server

LIMITS = {"max_body_bytes": 2_000_000}
TABLE = bad_requests(
    "dense",
    GatewaySettings(**LIMITS),
    classifier="colours",
    pair_classifier="pairs",
    images="pictures",
    finder="names",
    sounds="sounds",
)


@pytest.fixture(scope="module")
def client():
    with gateway_server(**LIMITS) as server, httpx.Client(base_url=server.url) as client:
        yield client


def test_gateway_bad_input_names_are_unique():
    """Each row of the table has a name of its own."""
    names = [bad.name for bad in TABLE]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("bad", TABLE, ids=lambda bad: bad.name)
@pytest.mark.parametrize("accept", ["application/json", "application/msgpack"])
def test_gateway_bad_input_is_a_clear_error(client, bad, accept):
    """A wrong request gets a 4xx that names the field, in either form; the next is served."""
    response = bad.send(client, accept)
    assert response.headers["content-type"] == accept
    bad.check(response)
    good = client.post("/v1/encode", json={"model": "dense", "inputs": "x"})
    assert good.status_code == 200
