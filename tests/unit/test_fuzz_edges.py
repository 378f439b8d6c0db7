"""Bodies, headers, catalog entries and settings, damaged: only the documented errors come out."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.catalog.load import BUILTIN, MAX_FILE_BYTES, read
from shoal.client.exchange import Reply, error_of
from shoal.configuration import load
from shoal.errors import CallerError, InvalidRequest, SettingsError, ShoalError, UnsupportedMedia
from shoal.gateway.ask import ask, request_id
from shoal.gateway.failures import error_body
from shoal.gateway.forms import JSON, MSGPACK, sent_form, wanted_form
from shoal.gateway.routes import TASKS
from shoal.gateway.uploads import reading
from shoal.settings import GatewaySettings, ServeSettings, WorkerSettings
from shoal.worker.costs import CostBook
from tests.support.local_submits import CATALOG
from tests.support.mutations import BINARY, FUZZ, NASTY, damaged, values

pytestmark = pytest.mark.slow

LIMITS = GatewaySettings()
LANES = ("interactive", "bulk")
BODIES = {
    "embeddings": [
        {"model": "dense", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 4},
        {"model": "dense", "input": [[1, 2], [3]], "user": "u"},
    ],
    "rerank": [
        {
            "model": "dense",
            "query": "q",
            "documents": ["a", {"text": "b"}],
            "top_n": 1,
            "return_documents": True,
        }
    ],
    "encode": [
        {"model": "org/both", "inputs": ["a"], "outputs": ["dense", "sparse"], "normalize": True},
        {"model": "dense", "inputs": "a", "prompt": "query", "truncate": True, "dimensions": 4},
    ],
    "score": [{"model": "dense", "query": "q", "texts": ["a", "b"]}],
    "classify": [
        {"model": "colours", "inputs": ["a", "b"]},
        {"model": "pairs", "inputs": [["a", "b"]]},
        {"model": "files", "inputs": [{"data": "AAAA"}], "multi_label": True, "threshold": 0.1},
    ],
    "extract": [
        {"model": "names", "inputs": ["a"], "labels": ["odd"], "threshold": 0.5},
        {"model": "pages", "inputs": {"data": "JVBERi0xLjcK"}, "outputs": ["text", "layout"]},
        {"model": "pages", "inputs": "data:application/pdf;base64,JVBERi0xLjcK"},
    ],
    "moderations": [
        {"model": "guard", "input": ["a", "b"]},
        {"input": [{"type": "text", "text": "a"}]},
    ],
    "transcriptions": [
        {
            "model": "sounds",
            "file": {"data": "UklGRiQAAABXQVZF"},
            "language": "en",
            "response_format": "srt",
            "timestamp_granularities[]": ["segment"],
        }
    ],
    "chat": [
        {
            "model": "writer",
            "messages": [
                {"role": "system", "content": "a"},
                {"role": "user", "content": [{"type": "text", "text": "b"}]},
            ],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object", "maximum": 5}},
            },
            "tools": [],
            "logprobs": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ],
    "completions": [
        {"model": "writer", "prompt": ["a", "b"], "n": 2, "stop": ["x"], "best_of": 2, "seed": 1},
    ],
    "generate": [
        {"model": "writer", "inputs": "a", "schema": {"enum": [1, "a"]}, "top_k": 4, "top_p": 0.5},
        {"model": "writer", "messages": [{"role": "user", "content": "a"}], "temperature": 1},
    ],
}


def refusal(route, body, form, query=b""):
    """Reads a body and makes its job, as the app does; the caller's error, if that is the end.

    form: JSON, MessagePack, or the type of a body that is a file.
    """
    try:
        kind = form if isinstance(form, bytes) else form.content_type
        request = reading(kind, query, route.reader, route.file)(body)
        route.job(request, ask({}, "r", CATALOG, LIMITS, LANES))
    except CallerError as error:
        return error
    return None


def take(route, body, form, query=b""):
    """A refusal must be one that a client can read."""
    error = refusal(route, body, form, query)
    if error is not None:
        assert error.http_status in (400, 404, 415)
        assert len(error.message) < 2000
        for shape in ("openai", "native"):
            told = error_body(error, shape, "r")
            packed = MSGPACK.encode(told)
            assert msgspec.json.decode(JSON.encode(told)) == msgspec.msgpack.decode(packed)


@pytest.mark.parametrize("route", TASKS, ids=lambda route: route.name)
@FUZZ
@given(data=st.data())
def test_fuzz_body_becomes_a_job_or_a_400(route, data):
    """Damaged bytes and foreign types in either form: a job, or an error that names the caller."""
    good = [dict(route.example), *BODIES[route.name]]
    take(route, data.draw(damaged([json.dumps(body).encode() for body in good])), JSON)
    take(route, data.draw(damaged([msgspec.msgpack.encode(body) for body in good])), MSGPACK)
    value = data.draw(values(good))
    take(route, json.dumps(value).encode(), JSON)
    take(route, msgspec.msgpack.encode(value), MSGPACK)
    binary = data.draw(values(good, [*NASTY, *BINARY]))
    take(route, msgspec.msgpack.encode(binary), MSGPACK)


FORM = (
    b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nsounds\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
    b"Content-Type: audio/wav\r\n\r\nRIFF\x24\0\0\0WAVE\r\n--x--\r\n"
)
FILES = [route for route in TASKS if route.file is not None]


@FUZZ
@given(data=st.data())
def test_fuzz_form_or_query_becomes_a_job_or_a_400(data):
    """Damaged forms, queries and types, with any bytes as the file, on every route with files."""
    route = data.draw(st.sampled_from(FILES))
    query = data.draw(damaged([b"model=sounds&language=en&outputs=speech", b"model=pages"]))
    kind, body = data.draw(
        st.sampled_from([(b"multipart/form-data; boundary=x", FORM), (b"audio/wav", FORM)])
    )
    take(route, data.draw(damaged([body])), data.draw(damaged([kind])), query)


@pytest.mark.parametrize("route", TASKS, ids=lambda route: route.name)
@pytest.mark.parametrize(
    "text",
    [
        '"\\ud800"',
        '["\\udfff\\ud800", "a"]',
        "1e400",
        "-0",
        "9" * 5000,
        "[" * 50_000,
        '{"a":' * 50_000,
        '"' + "x" * 70_000 + '"',
        "[" + "[]," * 5000 + "[]]",
        "[" + '"",' * 5000 + '""]',
        "NaN",
        "tru",
        "",
    ],
    ids=lambda text: text[:12],
)
def test_fuzz_body_with_an_extreme_value_is_a_400(route, text):
    """Extremes of JSON in the inputs (lone surrogates, huge numbers, depth) are refused."""
    body = f'{{"model":"dense","query":"q","{route.inputs}":{text}}}'.encode()
    assert refusal(route, body, JSON) is not None


HEADERS = {
    b"x-shoal-lane": b"bulk",
    b"x-shoal-tenant": b"team-7",
    b"x-shoal-deadline-ms": b"1500",
    b"traceparent": b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
}
NUMBERS = [b"nan", b"inf", b"-1", b"0", b"1e400", b"1_0", b"\xd9\xa1", b"0x10", b"", b" 5 "]


@FUZZ
@given(
    st.fixed_dictionaries(
        {}, optional={k: st.one_of(damaged([v, *NUMBERS]), st.binary()) for k, v in HEADERS.items()}
    )
)
def test_fuzz_steering_headers_are_taken_or_a_400(headers):
    """Any bytes in the headers that steer a request: sane values, or InvalidRequest."""
    with suppress(InvalidRequest):
        made = ask(headers, "r", CATALOG, LIMITS, LANES)
        assert made.lane in LANES
        assert 0 < made.deadline_s < 1e11


@FUZZ
@given(damaged([b"application/json; q=0.5", b"application/msgpack;q=1", b"*/*"]))
def test_fuzz_negotiation_and_request_ids_never_fail(value):
    """Any Accept has a form, any Content-Type has one or is 415, any request id becomes sane."""
    assert wanted_form(value) in (JSON, MSGPACK)
    with suppress(UnsupportedMedia):
        assert sent_form(value) in (JSON, MSGPACK)
    assert 0 < len(request_id(value)) <= 128


ENTRIES = [path.read_bytes() for path in sorted(BUILTIN.glob("*.yaml"))]
YAML_NASTY = [
    *(b"&a [*a]", b"!!python/object/apply:os.system [ls]", b"!!binary x", b"!!set {a}"),
    *(b"2026-99-99", b"1:99:99", b"0b2", b"0o9", b"1e999", b".nan", b"<<: {a: 1}", b"? [a]"),
    *(b'!!int ""', b'!!float ""', b"!!bool x", b"!!timestamp x", b"!!int [a]", b"!!omap x"),
    *(b"%TAG ! x", b"---\n---\n", b"{" * 500, b"[" * 500, b"- " * 500, b"\xff\xfe", b"\0", b"\x85"),
]


@FUZZ
@given(data=st.data())
def test_fuzz_catalog_entry_is_read_or_has_a_fault(tmp_path_factory, data):
    """A damaged YAML file is an entry or a list of faults, whatever is in it."""
    folder = tmp_path_factory.mktemp("catalog")
    text = bytearray(data.draw(st.one_of(st.sampled_from(ENTRIES), damaged(ENTRIES))))
    at = data.draw(st.integers(0, len(text)))
    text[at:at] = data.draw(st.sampled_from(YAML_NASTY))
    (folder / "entry.yaml").write_bytes(text)
    entries, faults = read(folder)
    assert len(entries) == 1 or faults
    assert all(fault.what for fault in faults)


def test_fuzz_catalog_file_over_the_limit_is_a_fault(tmp_path):
    """A file larger than an entry may be is not read to its end."""
    (tmp_path / "large.yaml").write_bytes(b"# " + b"x" * MAX_FILE_BYTES)
    entries, (fault,) = read(tmp_path)
    assert not entries
    assert "larger than" in fault.what


VALUES = ["", "0", "-1", "1", "1e400", "nan", "inf", "true", "x", "9" * 5000, "~nobody/x", "a\nb"]
TOML = [
    b'catalog = "models"\nport = 9000\n[serve]\nlog_level = "debug"\n[worker]\nthreads = 2\n',
    b"max_body_bytes = 99\nbody_timeout_s = 1.5\ninsecure = true\n",
]
TOML_NASTY = [b"[" * 3000, b"a = " + b"[" * 3000, b"{" * 3000, b"inf", b"nan", b"1979-05-27", b"0x"]


@FUZZ
@given(data=st.data())
def test_fuzz_settings_are_loaded_or_a_settings_error(tmp_path_factory, data):
    """Any variables and any settings file: settings of the right types, or SettingsError."""
    kind = data.draw(st.sampled_from([GatewaySettings, WorkerSettings, ServeSettings]))
    names = [each.name for each in fields(ServeSettings)]
    some = data.draw(st.dictionaries(st.sampled_from(names), st.sampled_from(VALUES), max_size=3))
    environ = {f"SHOAL_{name.upper()}": value for name, value in some.items()}
    file = tmp_path_factory.mktemp("settings") / "shoal.toml"
    text = bytearray(data.draw(damaged(TOML)))
    at = data.draw(st.integers(0, len(text)))
    text[at:at] = data.draw(st.sampled_from([b"", *TOML_NASTY]))
    file.write_bytes(text)
    with suppress(SettingsError):
        settings = load(kind, {}, environ, file if data.draw(st.booleans()) else None)
        assert 0 < settings.ack_wait_s < float("inf")


def test_fuzz_settings_file_nested_without_end_is_a_settings_error(tmp_path):
    """Nesting that the parser of TOML cannot follow names the file."""
    file = tmp_path / "shoal.toml"
    file.write_text("a = " + "[" * 100_000)
    with pytest.raises(SettingsError, match=str(file)):
        load(ServeSettings, {}, {}, file)


@FUZZ
@given(data=st.data())
def test_fuzz_client_makes_an_error_of_any_answer(data):
    """Whatever answers in the server's place, a client raises an error of ours."""
    told = {"error": {"code": "queue_full", "message": "m", "param": None, "request_id": "r"}}
    packed = data.draw(st.booleans())
    codec = msgspec.msgpack if packed else msgspec.json
    good = [codec.encode(told), codec.encode(told["error"])]
    content = data.draw(st.one_of(damaged(good), st.binary(max_size=40)))
    kind = "application/msgpack" if packed else "application/json"
    after = data.draw(st.sampled_from(["1", "-1", "nan", "inf", "1e400", "Wed, 21 Oct", ""]))
    status = data.draw(st.integers(300, 599))
    error = error_of(Reply(status, {"content-type": kind, "retry-after": after}, content))
    assert isinstance(error, ShoalError)
    assert error.retry_after_s is None or 0 <= error.retry_after_s < 3600


@FUZZ
@given(damaged([b'{"m@1 null cpux1":{"launch_s":0.1,"token_s":0.1}}', b""]))
def test_fuzz_cost_file_is_read_or_passed_over(tmp_path_factory, data):
    """A damaged file of learnt costs is an estimate less, never an error."""
    file: Path = tmp_path_factory.mktemp("costs") / "costs.json"
    file.write_bytes(data)
    CostBook(file, "cpux1")
