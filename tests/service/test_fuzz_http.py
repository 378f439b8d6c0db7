"""Requests made from our own /openapi.json, right and wrong, against a running server.

Every answer must be one that the description has: its status, its headers, its type and its shape.
No answer may take long, and none may be the server's fault.
"""

from __future__ import annotations

import base64
import copy
from typing import Any

import httpx
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from shoal.catalog.load import load
from shoal.gateway.routes import MODEL, PAGES, TASKS
from tests.support.mutations import FUZZ

# The fuzzer's own connections are closed when they are collected.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
]
MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
# A torch model takes seconds to load and answers as the others do.
MODELS = [entry.id for entry in load(None).entries if entry.runtime == "onnx"]
MAX_S = 10.0
BRIEF = hypothesis_settings(FUZZ, max_examples=25)


@schemathesis.serializer("application/msgpack")
def pack(_: Any, value: Any) -> bytes:
    """What is no value of MessagePack is sent as bytes that are no message."""
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, OverflowError, UnicodeEncodeError, RecursionError):
        return b"\xc1"


@schemathesis.deserializer("application/msgpack")
def unpack(_: Any, response: Any) -> Any:
    """Bytes as base64, which is what the schema calls them."""
    return _plain(msgspec.msgpack.decode(response.content))


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def schema(live_server):
    """The description as it is served, but that models are there and deadlines can be kept.

    Else most answers would be 404 and 504, and the others never be seen.
    """
    document = httpx.get(f"{live_server}/openapi.json").json()
    known = copy.deepcopy(document)
    known["components"]["parameters"]["Deadline"]["schema"] = {"type": "number", "minimum": 3e4}
    for task in TASKS:
        body = known["components"]["schemas"][task.reader.kind.__name__]
        body["properties"]["model"] = {"type": "string", "enum": MODELS}
    return schemathesis.openapi.from_dict(known)


def fuzz(schema: Any, url: str, path: str, method: str, mode: GenerationMode) -> list[int]:
    """Calls an operation again and again; returns the statuses."""
    statuses: list[int] = []
    session = requests.Session()
    session.trust_env = False

    @BRIEF
    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    def one(case: Any) -> None:
        response = case.call(base_url=url, session=session, timeout=MAX_S)
        case.validate_response(response, checks=CHECKS)
        statuses.append(response.status_code)

    one()
    session.close()
    return statuses


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_fuzz_http_tasks_answer_as_described(schema, live_server, task, mode):
    """Right and wrong bodies and headers of every task route, in both forms."""
    statuses = fuzz(schema, live_server, task.path, "POST", mode)
    assert any(status == 400 for status in statuses)
    if mode is GenerationMode.NEGATIVE:
        refused = sum(400 <= status < 500 for status in statuses)
        assert refused > 0.8 * len(statuses)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_fuzz_http_pages_answer_as_described(schema, live_server, page):
    """Every GET route with anything where a parameter may be."""
    statuses = fuzz(schema, live_server, page.path, "GET", GenerationMode.POSITIVE)
    assert set(statuses) <= ({404} if page is MODEL else {200})
