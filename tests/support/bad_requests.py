"""Requests that are wrong, each with the answer that it must get: data for every suite.

Any server can be tried with it, given the names of some of its models and the limits it runs with.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from shoal.settings import GatewaySettings
from tests.support.bad import Bad, as_json
from tests.support.bad_files import bad_files


def bad_requests(
    dense: str,
    limits: GatewaySettings,
    *,
    classifier: str | None = None,
    pair_classifier: str | None = None,
    images: str | None = None,
    finder: str | None = None,
    sounds: str | None = None,
) -> list[Bad]:
    """The whole table.

    dense: a model that gives dense vectors and scores, and does not classify.
    classifier: one that labels single texts and does nothing else. pair_classifier: one that labels
    pairs. images: one that encodes images and takes no text. finder: one that finds entities in
    texts and has the labels `odd` and `even`. sounds: one that transcribes. Where there is none,
    its rows are left out.
    """
    table = [
        *_bodies(dense),
        *_embeddings_fields(dense),
        *_encode_fields(dense),
        *_rerank_fields(dense),
        *_task_fields(dense),
        *_inputs(dense, limits),
        *_objects(dense),
        *_token_ids(dense),
        *_headers(dense, limits),
        *bad_files(dense, limits, images=images, finder=finder, sounds=sounds),
    ]
    if classifier is not None:
        table += _classify(classifier)
    if pair_classifier is not None:
        table += _classify_pairs(pair_classifier)
    return table


def _bodies(dense: str) -> list[Bad]:
    path = "/v1/embeddings"
    packed = {"content-type": "application/msgpack"}
    model = json.dumps(dense).encode()
    good = msgspec.msgpack.encode({"model": dense, "input": "x"})
    deep = b'{"model":' + model + b',"input":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    return [
        Bad("empty body", path, b"", says="empty"),
        Bad("empty body, packed", path, b"", says="empty", headers=packed),
        Bad("malformed JSON", path, b'{"model": ', says="not valid JSON"),
        Bad(
            "trailing characters",
            path,
            as_json({"model": dense, "input": "x"}) + b" x",
            says="JSON",
        ),
        Bad("malformed MessagePack", path, b"\xc1", headers=packed, says="not valid MessagePack"),
        Bad("truncated MessagePack", path, good[:-1], headers=packed, says="MessagePack"),
        Bad("trailing MessagePack", path, good + b"\x01", headers=packed, says="MessagePack"),
        Bad("array length that lies", path, b"\xdd\xff\xff\xff\xff", headers=packed),
        Bad("JSON said to be MessagePack", path, as_json({"model": dense}), headers=packed),
        Bad("MessagePack said to be JSON", path, good, says="JSON"),
        Bad("null", path, b"null", says="object"),
        Bad("array at the top", path, as_json([dense, "x"]), says="object"),
        Bad("string at the top", path, b'"x"', says="object"),
        Bad("number at the top", path, b"1e999"),
        Bad("key that is no string", path, b"\x81\x01\x02", headers=packed),
        Bad("invalid UTF-8", path, b'{"model":' + model + b',"input":"\xff"}', says="UTF-8"),
        Bad("lone surrogate", path, b'{"model":' + model + b',"input":"\\ud800"}', says="JSON"),
        Bad(
            "lone surrogate in a list",
            path,
            b'{"model":' + model + b',"input":["a","\\udc00 b"]}',
            says="surrogate",
        ),
        Bad("surrogate, packed", path, b"\x81\xa5model\xa3\xed\xa0\x80", headers=packed),
        Bad("deep nesting", path, deep, param="input[0][0]"),
        Bad("deep nesting, packed", path, b"\x91" * 100_000 + b"\x01", headers=packed),
        Bad("no such path", "/v1/nothing", b"{}", status=404, code="not_found", says="path"),
    ]


def _embeddings_fields(dense: str) -> list[Bad]:
    def embed(name: str, param: str, says: str = "", /, **fields: Any) -> Bad:
        body = {"model": dense, "input": "x"} | fields
        return Bad(name, "/v1/embeddings", as_json(body), param=param, says=says)

    def unknown(name: str, **fields: str) -> Bad:
        body = {"model": f"{dense}x", "input": "x"} | fields
        return Bad(
            name, "/v1/embeddings", as_json(body), 404, "model_not_found", "model", f"`{dense}`"
        )

    return [
        Bad("no model", "/v1/embeddings", b'{"input":"x"}', param="model", says="required"),
        Bad(
            "no input", "/v1/embeddings", as_json({"model": dense}), param="input", says="required"
        ),
        Bad("no inputs", "/v1/encode", as_json({"model": dense}), param="inputs", says="required"),
        embed("model null", "model", model=None),
        embed("model empty", "model", model=""),
        embed("model number", "model", model=7),
        embed("model of 1 MB", "model", model="m" * 1_000_000),
        unknown("unknown model"),
        unknown("unknown revision", model=f"{dense}@no-such"),
        embed("unknown field", "dimension", "`dimensions`", dimension=4),
        embed("unknown field, far", "qqqqqqqq", "unknown field", qqqqqqqq=4),
        embed("unknown field of 1 MB", "x" * 400 + "...", "unknown field", **{"x" * 1_000_000: 1}),
        embed("dimensions 0", "dimensions", dimensions=0),
        embed("dimensions negative", "dimensions", dimensions=-1),
        embed("dimensions float", "dimensions", dimensions=4.0),
        embed("dimensions string", "dimensions", dimensions="4"),
        embed("dimensions true", "dimensions", dimensions=True),
        embed("dimensions over the model's", "dimensions", "have", dimensions=1_000_000),
        embed("dimensions huge", "dimensions", dimensions=10**30),
        Bad(
            "dimensions out of range",
            "/v1/embeddings",
            b'{"model":' + json.dumps(dense).encode() + b',"input":"x","dimensions":1e999}',
            param="dimensions",
        ),
        embed("encoding_format", "encoding_format", "base64, float", encoding_format="int8"),
        embed("encoding_format number", "encoding_format", encoding_format=1),
        embed("truncate string", "truncate", truncate="true"),
        embed("normalize number", "normalize", normalize=1),
        embed("user number", "user", user=1),
        embed("unknown prompt", "prompt", "known", prompt="nonsense"),
    ]


def _encode_fields(dense: str) -> list[Bad]:
    def encode(name: str, param: str, says: str = "", /, **fields: Any) -> Bad:
        body = {"model": dense, "inputs": "x"} | fields
        return Bad(name, "/v1/encode", as_json(body), param=param, says=says)

    return [
        encode("field of another route", "input", "`inputs`", input="x"),
        encode("unknown output", "outputs[0]", "dense, multivector, sparse", outputs=["spars"]),
        encode("output that the model lacks", "outputs[0]", "dense", outputs=["sparse"]),
        encode("no outputs", "outputs", outputs=[]),
        encode("outputs string", "outputs", outputs="dense"),
    ]


def _rerank_fields(dense: str) -> list[Bad]:
    def rerank(name: str, param: str, says: str = "", /, **fields: Any) -> Bad:
        body = {"model": dense, "query": "q", "documents": ["d"]} | fields
        return Bad(name, "/v1/rerank", as_json(body), param=param, says=says)

    return [
        rerank("top_n 0", "top_n", top_n=0),
        rerank("top_n negative", "top_n", top_n=-3),
        rerank("top_n float", "top_n", top_n=1.5),
        rerank("return_documents string", "return_documents", return_documents="yes"),
        rerank("query empty", "query", query=""),
        rerank("query null", "query", query=None),
        rerank("query list", "query", query=["q"]),
        rerank("documents empty", "documents", documents=[]),
        rerank("documents string", "documents", documents="d"),
        rerank("documents null", "documents", documents=None),
        rerank("document number", "documents[1]", documents=["a", 3]),
        rerank("document empty", "documents[1]", documents=["a", ""]),
        rerank("document object empty", "documents[1]", documents=["a", {"text": ""}]),
        rerank("document without text", "documents[0].text", documents=[{}]),
        rerank("document with more", "documents[0].titel", documents=[{"text": "a", "titel": "b"}]),
    ]


def _task_fields(dense: str) -> list[Bad]:
    return [
        Bad(
            "score without texts",
            "/v1/score",
            as_json({"model": dense, "query": "q"}),
            param="texts",
            says="required",
        ),
        Bad(
            "score with texts and documents",
            "/v1/score",
            as_json({"model": dense, "query": "q", "texts": ["a"], "documents": ["a"]}),
            param="documents",
        ),
        Bad(
            "model that does not classify",
            "/v1/classify",
            as_json({"model": dense, "inputs": "x"}),
            param="model",
            says="/v1/embeddings",
        ),
    ]


def _inputs(dense: str, limits: GatewaySettings) -> list[Bad]:
    long = "x" * (limits.max_input_chars + 1)
    cases: list[tuple[str, Any, str, str]] = [
        ("null", None, "", "invalid_request"),
        ("number", 3, "", "invalid_request"),
        ("true", True, "", "invalid_request"),
        ("empty list", [], "", "invalid_request"),
        ("empty string", "", "", "invalid_request"),
        ("empty string in a list", ["a", ""], "[1]", "invalid_request"),
        ("null in a list", ["a", None], "[1]", "invalid_request"),
        ("float in a list", ["a", 1.5], "[1]", "invalid_request"),
        ("number among texts", ["a", 1], "[1]", "invalid_request"),
        ("list among texts", ["a", [1]], "[1]", "invalid_request"),
        ("10,000 texts", ["a"] * 10_000, "", "invalid_request"),
        ("long text", long, "", "input_too_long"),
        ("long text in a list", ["a", "b", long], "[2]", "input_too_long"),
    ]
    return [
        Bad(
            f"{field}: {name}",
            path,
            as_json({"model": dense, field: value}),
            code=code,
            param=f"{field}{place}",
        )
        for path, field in (("/v1/embeddings", "input"), ("/v1/encode", "inputs"))
        for name, value, place, code in cases
    ]


def _objects(dense: str) -> list[Bad]:
    cases: list[tuple[str, Any, str]] = [
        ("object", {"text": "x"}, "input"),
        ("object in a list", ["a", "b", {}], "input[2]"),
    ]
    return [
        Bad(
            f"input: {name}",
            "/v1/embeddings",
            as_json({"model": dense, "input": value}),
            param=param,
        )
        for name, value, param in cases
    ]


def _token_ids(dense: str) -> list[Bad]:
    cases: list[tuple[str, Any, str]] = [
        ("negative", [5, -1], "[1]"),
        ("too large", [5, 2**32], "[1]"),
        ("huge", [10**40], "[0]"),
        ("true", [5, True], "[1]"),
        ("text among them", [5, "a"], "[1]"),
        ("list among them", [5, [6]], "[1]"),
        ("empty list in a list", [[5], []], "[1]"),
        ("text in a list", [[5], ["a"]], "[1][0]"),
        ("negative in a list", [[5], [6, -7]], "[1][1]"),
        ("number among lists", [[5], 6], "[1]"),
        ("10,000 lists", [[5]] * 10_000, ""),
    ]
    return [
        Bad(
            f"token ids: {name}",
            "/v1/embeddings",
            as_json({"model": dense, "input": ids}),
            param=f"input{place}",
        )
        for name, ids, place in cases
    ]


def _classify(classifier: str) -> list[Bad]:
    cases: list[tuple[str, Any, str]] = [
        ("null", None, ""),
        ("empty list", [], ""),
        ("empty string", "", ""),
        ("empty string in a list", ["a", ""], "[1]"),
        ("number in a list", ["a", 1], "[1]"),
        ("pair of one", [["a"]], "[0]"),
        ("pair of three", [["a", "b", "c"]], "[0]"),
        ("pair with a number", [["a", 1]], "[0][1]"),
        ("pair among texts", ["a", ["b", "c"]], "[1]"),
        ("pairs for a model of single texts", [["a", "b"]], ""),
        ("10,000 texts", ["a"] * 10_000, ""),
    ]
    return [
        Bad(
            "model that does not embed",
            "/v1/embeddings",
            as_json({"model": classifier, "input": "x"}),
            param="model",
            says="/v1/classify",
        ),
        *_classify_cases("classify", classifier, cases),
    ]


def _classify_pairs(pair_classifier: str) -> list[Bad]:
    cases: list[tuple[str, Any, str]] = [
        ("text among pairs", [["b", "c"], "a"], "[1]"),
        ("empty first text", [["b", "c"], ["", "c"]], "[1][0]"),
        ("empty second text", [["b", ""]], "[0][1]"),
        ("texts for a model of pairs", ["a", "b"], ""),
        ("text for a model of pairs", "a", ""),
        ("10,000 pairs", [["a", "b"]] * 10_000, ""),
    ]
    return _classify_cases("classify pairs", pair_classifier, cases)


def _classify_cases(kind: str, model: str, cases: list[tuple[str, Any, str]]) -> list[Bad]:
    return [
        Bad(
            f"{kind}: {name}",
            "/v1/classify",
            as_json({"model": model, "inputs": value}),
            param=f"inputs{place}",
        )
        for name, value, place in cases
    ]


def _headers(dense: str, limits: GatewaySettings) -> list[Bad]:
    good = as_json({"model": dense, "input": "x"})
    path = "/v1/embeddings"

    def header(name: str, header: str, value: str, **expected: Any) -> Bad:
        expected = {"param": header} | expected
        return Bad(name, path, good, headers={header: value}, **expected)

    large = as_json({"model": dense, "input": "x" * limits.max_body_bytes})
    media = {"status": 415, "code": "unsupported_media_type"}
    return [
        header("lane", "X-Shoal-Lane", "fast", says="interactive, bulk"),
        header("tenant", "X-Shoal-Tenant", "a b", says="64"),
        header("tenant too long", "X-Shoal-Tenant", "x" * 65),
        header("deadline 0", "X-Shoal-Deadline-Ms", "0"),
        header("deadline negative", "X-Shoal-Deadline-Ms", "-5"),
        header("deadline word", "X-Shoal-Deadline-Ms", "soon"),
        header("deadline nan", "X-Shoal-Deadline-Ms", "nan"),
        header("deadline inf", "X-Shoal-Deadline-Ms", "inf"),
        Bad(
            "content type",
            path,
            good,
            param="Content-Type",
            headers={"content-type": "text/plain"},
            says="application/json",
            **media,
        ),
        header("content encoding", "Content-Encoding", "gzip", **media),
        Bad("body over the limit", path, large, 413, "payload_too_large", says="limit"),
        Bad("wrong method", path, good, 405, "method_not_allowed", method="PUT", says="POST"),
        Bad("GET of a POST", "/v1/encode", b"", 405, "method_not_allowed", method="GET"),
        Bad("POST of a GET", "/v1/models", b"{}", 405, "method_not_allowed", says="GET"),
        Bad("DELETE of a page", "/readyz", b"", 405, "method_not_allowed", method="DELETE"),
    ]
