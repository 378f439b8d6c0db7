"""The GET routes: models, health, metrics, the description and the page to try it.

Owns their answers. Does not own dispatch (`app`) or what a model card holds (`openai`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from shoal.catalog.snapshot import Snapshot
from shoal.core.lanes import LaneRule
from shoal.gateway import openai
from shoal.gateway.forms import Form
from shoal.gateway.jobs import Submits
from shoal.gateway.openapi import document
from shoal.gateway.routes import (
    DOCS,
    LIVE,
    METRICS,
    MODEL,
    MODELS,
    OPENAPI,
    PAGES,
    READY,
    TASKS,
    Health,
    PageRoute,
)

# The page is one file with its own script and style; it may talk to this server and no other.
_DOCS_POLICY = (
    b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Response(msgspec.Struct):
    """An HTTP answer that is ready to be sent.

    final: the same request would get the same again; else another try may do better.
    """

    status: int
    content_type: bytes
    body: bytes
    headers: list[tuple[bytes, bytes]] = []
    final: bool = True


class Pages:
    """Answers of the GET routes; `draining` makes /readyz say no."""

    def __init__(
        self,
        catalog: Callable[[], Snapshot],
        submits: Submits,
        registry: CollectorRegistry,
        lanes: tuple[LaneRule, ...],
    ) -> None:
        self._catalog = catalog
        self._submits = submits
        self._registry = registry
        self.draining = False
        self._answers: dict[PageRoute, Callable[[str, Form], Response]] = {
            LIVE: lambda _, form: _response(200, Health("alive"), form),
            READY: lambda _, form: self._ready(form),
            METRICS: lambda _path, _form: self._metrics(),
            MODELS: lambda _, form: self._models(form),
            MODEL: self._model,
            OPENAPI: lambda _path, _form: Response(200, b"application/json", description(lanes)),
            DOCS: lambda _path, _form: _docs(),
        }

    def get(self, route: PageRoute, path: str, form: Form) -> Response:
        """The answer to a GET of `path`. Raises `UnknownModel`."""
        return self._answers[route](path, form)

    def _ready(self, form: Form) -> Response:
        reason = "the gateway is shutting down" if self.draining else self._submits.ready()
        if reason is None:
            return _response(200, Health("ready", models=self._faults()), form)
        return _response(503, Health("not ready", reason), form)

    def _faults(self) -> dict[str, str]:
        """The models that no worker can serve just now, each with why."""
        states = self._submits.model_states()
        return {k: s.reason for k, s in states.items() if s.state == "unavailable"}

    def _metrics(self) -> Response:
        return Response(200, CONTENT_TYPE_LATEST.encode(), generate_latest(self._registry))

    def _models(self, form: Form) -> Response:
        models = openai.model_list(self._catalog(), self._submits.model_states())
        return _response(200, models, form)

    def _model(self, path: str, form: Form) -> Response:
        name = path.removeprefix(MODEL.path.partition("{")[0])
        card = openai.model_card(self._catalog(), name, self._submits.model_states())
        return _response(200, card, form)


def _docs() -> Response:
    policy = (b"content-security-policy", _DOCS_POLICY)
    return Response(200, b"text/html; charset=utf-8", _docs_page(), [policy])


@cache
def description(lanes: tuple[LaneRule, ...]) -> bytes:
    """`/openapi.json`, written once."""
    return msgspec.json.format(msgspec.json.encode(document(TASKS, PAGES, lanes)), indent=1)


@cache
def _docs_page() -> bytes:
    return files("shoal.gateway").joinpath("docs.html").read_bytes()


def _response(status: int, body: msgspec.Struct, form: Form) -> Response:
    return Response(status, form.content_type, form.encode(body))
