"""A wrong request and the answer that it must get.

Owns sending it and judging the answer. The rows are in `bad_requests` and `bad_files`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

OPENAI_PATHS = ("/v1/embeddings", "/v1/models", "/v1/moderations", "/v1/audio", "/v1/nothing")


@dataclass(frozen=True)
class Bad:
    """A wrong request. `param` is the field that the answer must name; `says` is in its message."""

    name: str
    path: str
    body: bytes
    status: int = 400
    code: str = "invalid_request"
    param: str | None = None
    says: str = ""
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)

    def send(self, client: httpx.Client, accept: str = "application/json") -> httpx.Response:
        """Sends it."""
        headers = {"content-type": "application/json", "accept": accept, **self.headers}
        if not headers["content-type"]:
            del headers["content-type"]
        return client.request(self.method, self.path, content=self.body, headers=headers)

    def check(self, response: httpx.Response) -> None:
        """Asserts that the answer is the right one, in the right shape."""
        assert response.status_code == self.status, response.text
        packed = response.headers["content-type"] == "application/msgpack"
        body = (msgspec.msgpack if packed else msgspec.json).decode(response.content)
        if self.path.startswith(OPENAI_PATHS):
            assert set(body) == {"error"}
            error = body["error"]
            assert error.pop("type") == "invalid_request_error"
        else:
            error = body
        assert set(error) == {"code", "message", "param", "request_id"}
        assert error["code"] == self.code
        assert error["param"] == self.param
        assert error["request_id"] == response.headers["x-request-id"]
        assert self.says.casefold() in error["message"].casefold()
        assert 0 < len(error["message"]) < 1000


def as_json(value: Any) -> bytes:
    """A body in JSON."""
    return json.dumps(value).encode()
