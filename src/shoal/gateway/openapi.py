"""`/openapi.json`: the table of routes as OpenAPI 3.1.

Owns the document's frame. Every schema comes from the struct that its route decodes or encodes, so
that nothing is described twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from shoal import __version__
from shoal.core.lanes import LaneRule
from shoal.gateway.failures import NativeError, OpenAIError, Shape
from shoal.gateway.routes import PageRoute, TaskRoute
from shoal.gateway.stream import NativeStreamError
from shoal.gateway.uploads import MULTIPART, RAW_TYPES

_TYPES = ("application/json", "application/msgpack")
_FAILURES = {
    "400": "A field is wrong; `param` names it.",
    "404": "No such model; the message has near names.",
    "408": "The body did not arrive in time.",
    "413": "The body is over the limit.",
    "415": "The body is neither JSON nor MessagePack, nor a file where one is taken.",
    "422": "The `Idempotency-Key` was sent with another request before.",
    "429": "The queue is full, or the answer could not be in time; `Retry-After` says when to try "
    "again.",
    "431": "The headers are over the limit.",
    "500": "The model failed on this input, or the server is at fault.",
    "503": "Not served now; `Retry-After` says when to try again.",
    "504": "No answer before the deadline.",
}
_PAGE_FAILURES = {"404": "No such model."}


def document(
    tasks: Sequence[TaskRoute], pages: Sequence[PageRoute], lanes: Sequence[LaneRule]
) -> dict[str, Any]:
    """The whole description, ready to be encoded. lanes: the default first."""
    kinds: list[type] = [NativeError, OpenAIError, NativeStreamError]
    for task in tasks:
        kinds += [task.reader.kind, task.response, *task.events]
    kinds += [page.response for page in pages if page.response is not None]
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    refs = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, Any] = {task.path: {"post": _task(task, refs)} for task in tasks}
    paths |= {page.path: {"get": _page(page, refs)} for page in pages}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Shoal",
            "version": __version__,
            "description": "Small models behind one shared queue. Every task route takes and "
            "gives JSON or MessagePack, by `Content-Type` and `Accept`. Where files are taken, the "
            "body may be the file itself, with the other fields in the query, or a form; a field "
            "that holds a list may come several times, or once with commas.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "parameters": {"Lane": _lane(lanes), **_PARAMETERS},
            "headers": _HEADERS,
        },
    }


def _lane(lanes: Sequence[LaneRule]) -> dict[str, Any]:
    names = [rule.name for rule in lanes]
    rules = ", ".join(
        f"`{rule.name}` {rule.weight:g} (batches of {rule.quantum_s * 1e3:g} ms at most)"
        for rule in lanes
    )
    return {
        "name": "X-Shoal-Lane",
        "in": "header",
        "description": f"Class of service. Shares of device time: {rules}.",
        "schema": {"type": "string", "enum": names, "default": names[0]},
    }


_PARAMETERS: dict[str, Any] = {
    "Tenant": {
        "name": "X-Shoal-Tenant",
        "in": "header",
        "description": "Who asks. Tenants of a model get equal shares of it. The name is believed "
        "as it is: there is no authentication yet.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"},
    },
    "Deadline": {
        "name": "X-Shoal-Deadline-Ms",
        "in": "header",
        "description": "Milliseconds until the answer is of no more use.",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    },
    "Idempotency": {
        "name": "Idempotency-Key",
        "in": "header",
        "description": "A random name of this request: a retry with the same key, through any "
        "gateway, gets the answer of the first try instead of running again. Answers are kept for "
        "a while, and those with status 429 or 5xx not at all.",
        "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
    },
    "RequestId": {
        "name": "X-Request-Id",
        "in": "header",
        "description": "Comes back in the answer and stands in logs; one is made when left out.",
        "schema": {"type": "string", "maxLength": 128},
    },
    "Trace": {
        "name": "traceparent",
        "in": "header",
        "description": "W3C trace context.",
        "schema": {"type": "string"},
    },
}
_HEADERS: dict[str, Any] = {
    "RequestId": {"description": "Id of the request.", "schema": {"type": "string"}},
    "ServerTiming": {
        "description": "Milliseconds in the queue, loading the model, and running; where texts are "
        "generated also to the first token (`ttft`) and of each further one (`tpot`).",
        "schema": {"type": "string"},
        "example": "queue;dur=0.8, load;dur=0.0, run;dur=4.2",
    },
    "Replayed": {
        "description": "There when the answer is that of an earlier try.",
        "schema": {"type": "string", "enum": ["true"]},
    },
    "RetryAfter": {
        "description": "Seconds until another try may succeed.",
        "schema": {"type": "integer", "minimum": 1},
    },
}


def _task(route: TaskRoute, refs: dict[Any, Any]) -> dict[str, Any]:
    body = {"schema": refs[route.reader.kind], "example": dict(route.example)}
    answer = {"schema": refs[route.response]}
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": ["tasks"],
        "parameters": [
            {"$ref": f"#/components/parameters/{name}"} for name in ("Lane", *_PARAMETERS)
        ],
        "requestBody": {"required": True, "content": _in_both(body)},
        "responses": {
            "200": {
                "description": "The answer.",
                "headers": _header_refs("RequestId", "ServerTiming", "Replayed"),
                "content": _in_both(answer)
                | {name: {"schema": {"type": "string"}} for name in route.texts},
            },
            **_failures(_FAILURES, route.shape, refs),
        },
    }
    if route.events:
        operation["responses"]["200"]["content"]["text/event-stream"] = _events(route, refs)
    if route.file is not None:
        operation["parameters"] += _query(route)
        operation["requestBody"]["content"] |= {name: {} for name in RAW_TYPES}
        operation["requestBody"]["content"][MULTIPART] = {"schema": _form(route)}
    return operation


def _events(route: TaskRoute, refs: dict[Any, Any]) -> dict[str, Any]:
    """An answer with `stream`: one of these after each `data: `, an error event at the worst."""
    failed = refs[OpenAIError if route.shape == "openai" else NativeStreamError]
    return {"schema": {"anyOf": [*(refs[kind] for kind in route.events), failed]}}


def _query(route: TaskRoute) -> list[dict[str, Any]]:
    """The fields beside a body that is a file; the names of headers are those of all bodies."""
    return [
        {
            "name": name,
            "in": "query",
            "description": "Where the body is a file: as the field of that name.",
            "schema": {"type": "array", "items": {"type": "string"}}
            if name in route.reader.lists
            else {"type": "string"},
        }
        for name in _names(route)
        if name != route.file
    ]


def _form(route: TaskRoute) -> dict[str, Any]:
    """A form of the same fields; the file has a part of its own."""
    text = {"type": "string"}
    fields = {name: text for name in _names(route) if name != route.file}
    return {"type": "object", "properties": {route.file: {**text, "format": "binary"}, **fields}}


def _names(route: TaskRoute) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(route.reader.kind)]


def _page(route: PageRoute, refs: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {route.content_type: {}}
    if route.response is not None:
        content = _in_both({"schema": refs[route.response]})
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": ["models" if route.shape == "openai" else "operations"],
        "responses": {
            str(status): {
                "description": "The answer." if status == 200 else "Not now.",
                "headers": _header_refs("RequestId"),
                "content": content,
            }
            for status in route.statuses
        },
    }
    if "{model}" in route.path:
        operation["parameters"] = [
            {
                "name": "model",
                "in": "path",
                "required": True,
                "description": "Id, alias, or either with `@revision`; it may contain a slash.",
                "schema": {"type": "string"},
            }
        ]
        operation["responses"] |= _failures(_PAGE_FAILURES, route.shape, refs)
    return operation


def _failures(statuses: dict[str, str], shape: Shape, refs: dict[Any, Any]) -> dict[str, Any]:
    schema = refs[OpenAIError if shape == "openai" else NativeError]
    return {
        status: {
            "description": description,
            "headers": _header_refs(
                "RequestId", *(["RetryAfter"] if status in ("429", "503") else [])
            ),
            "content": _in_both({"schema": schema}),
        }
        for status, description in statuses.items()
    }


def _in_both(content: dict[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(_TYPES, content)


def _header_refs(*names: str) -> dict[str, Any]:
    titles = {
        "RequestId": "X-Request-Id",
        "ServerTiming": "Server-Timing",
        "Replayed": "Idempotent-Replayed",
        "RetryAfter": "Retry-After",
    }
    return {titles[name]: {"$ref": f"#/components/headers/{name}"} for name in names}
