"""The ASGI application: a request in, the route's answer out, every error in the right shape.

Owns dispatch, the headers of every answer, the mapping of errors, counting, and the end of a job
whose client left. Does not own the routes (`routes`), the queue (`submit`) or the server (`run`).
Written on bare ASGI because a framework costs several times what the rest of the path does.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from shoal import clock
from shoal.catalog.snapshot import Snapshot
from shoal.core.lanes import parse_lanes
from shoal.core.spelling import did_you_mean
from shoal.errors import (
    Bug,
    CallerError,
    CapacityError,
    ClientGone,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    QueueFull,
    QueueUnavailable,
    ShoalError,
    ShuttingDown,
)
from shoal.gateway.ask import Ask, ask, request_id
from shoal.gateway.failures import Shape, error_body, error_headers
from shoal.gateway.files import File
from shoal.gateway.forms import MSGPACK
from shoal.gateway.generation import wholes
from shoal.gateway.idempotency import HEADER, Idempotency, once
from shoal.gateway.jobs import Job, Submits, in_request, n_inputs, place_in_request
from shoal.gateway.pages import Pages, Response
from shoal.gateway.respond import Text
from shoal.gateway.routes import MODEL, PAGES, TASKS, PageRoute, TaskRoute
from shoal.gateway.stream import CONTENT_TYPE, Told, error_frame
from shoal.gateway.telling import Telling
from shoal.gateway.timing import server_timing, speed_of
from shoal.gateway.traffic import Traffic
from shoal.gateway.uploads import reading
from shoal.gateway.visit import LEFT, SHORT_WAY, Attendant, Receive, Scope, Send, Visit
from shoal.settings import GatewaySettings

log = logging.getLogger("shoal.gateway")

_INPUTS = re.compile(r"inputs?((?:\[\d+\])*)")
_MODEL_PREFIX = MODEL.path.partition("{")[0]


class App:
    """ASGI callable.

    catalog: gives the snapshot of this moment. registry: where the process's other metrics are;
    /metrics shows it. idempotency: None refuses requests with a key. The server must run the
    lifespan, which limits the time of bodies, and must tell of clients that leave (`visit.LEFT`).
    """

    def __init__(
        self,
        settings: GatewaySettings,
        catalog: Callable[[], Snapshot],
        submits: Submits,
        registry: CollectorRegistry | None = None,
        idempotency: Idempotency | None = None,
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._submits = submits
        self._idempotency = idempotency
        self._traffic = Traffic()
        registry = CollectorRegistry() if registry is None else registry
        registry.register(self._traffic)
        lanes = parse_lanes(settings.lanes)
        self._lanes = tuple(rule.name for rule in lanes)
        self._pages = Pages(catalog, submits, registry, lanes)
        self._attendant = Attendant(
            settings.body_timeout_s, settings.max_open_requests, settings.max_open_bytes
        )
        self._routes: dict[str, TaskRoute | PageRoute] = {task.path: task for task in TASKS}
        self._routes |= {page.path: page for page in PAGES if page is not MODEL}

    @property
    def draining(self) -> bool:
        """Whether /readyz says no because the process is about to leave."""
        return self._pages.draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._pages.draining = value

    async def _lifespan(self, kind: str, receive: Receive, send: Send) -> None:
        if kind != "lifespan":
            raise NotImplementedError(kind)
        await receive()
        attendant = asyncio.create_task(self._attendant.run(), name="gateway-attendant")
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self.draining = True
        attendant.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI scope: a request, or the lifespan."""
        if scope["type"] != "http":
            await self._lifespan(scope["type"], receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        short_way = scope.pop(SHORT_WAY, None)  # it refers to the scope: left there, a circle
        visit = Visit(headers, request_id(headers.get(b"x-request-id")), receive, send, short_way)
        path: str = scope["path"]
        visit.query = scope["query_string"]
        route = self._route(path)
        self._attendant.enter(visit)
        scope[LEFT] = visit.left
        try:
            response = await self._answer(visit, route, scope["method"], path)
        except ClientGone:
            response = None
        except ShoalError as error:
            response = self._failed(error, visit, route, path)
        except asyncio.CancelledError:
            over = visit.over
            if over is None and self.draining:  # the server's time for open requests is over
                over = ShuttingDown("the gateway is shutting down; another may answer")
            if over is None or visit.task is None:
                raise
            visit.task.uncancel()
            gone = isinstance(over, ClientGone)
            response = None if gone else self._failed(over, visit, route, path)
        except Exception:  # task root: one request
            log.exception("request %s to %r failed", visit.id, path[:128])
            bug = Bug(f"internal error; the log has it under request id {visit.id}")
            response = self._failed(bug, visit, route, path)
        finally:
            del scope[LEFT]  # also the way out of a circle of references
            visit.unattended()
            self._attendant.leave(visit)
        name = "none" if route is None else route.name
        took_s = clock.monotonic() - visit.started_s
        if response is None:
            self._traffic.add(name, ClientGone.http_status, took_s, visit.in_bytes, 0)
            return
        out_bytes = len(response.body) + (visit.streamed_bytes or 0)
        self._traffic.add(name, response.status, took_s, visit.in_bytes, out_bytes)
        await _send(visit, response)

    def _route(self, path: str) -> TaskRoute | PageRoute | None:
        route = self._routes.get(path)
        if route is None and path.startswith(_MODEL_PREFIX) and len(path) > len(_MODEL_PREFIX):
            return MODEL
        return route

    async def _answer(
        self, visit: Visit, route: TaskRoute | PageRoute | None, method: str, path: str
    ) -> Response:
        if isinstance(route, TaskRoute):
            if method != "POST":
                raise MethodNotAllowed(f"{path} takes POST, not {method[:20]}")
            return await self._task(visit, route)
        if route is None:
            if path == "/":
                return Response(302, b"text/plain", b"", [(b"location", b"/docs")])
            guess = did_you_mean(path[:128], self._routes) or "; /openapi.json lists the paths"
            raise NotFound(f"no such path{guess}")
        if method not in ("GET", "HEAD"):
            raise MethodNotAllowed(f"{path[:128]} takes GET, not {method[:20]}")
        self._traffic.n_open = self._attendant.n_open
        return self._pages.get(route, path, visit.form)

    async def _task(self, visit: Visit, route: TaskRoute) -> Response:
        if self._attendant.overfull:
            raise QueueFull(f"{self._settings.max_open_requests} requests are being answered")
        kind = visit.headers.get(b"content-type")
        read = reading(kind, visit.query, route.reader, route.file)
        body = await visit.body(self._settings.max_body_bytes, self._attendant)
        request = read(body)
        asked = self._ask(visit)
        job = asked.adapted(route.job(request, asked), request)
        key = visit.headers.get(b"idempotency-key")
        if route.stream is not None:
            telling = _telling(route.stream, request, job, key)
            if telling is not None:
                return await self._stream(visit, route, request, job, telling)
        if key is not None:
            if visit.query or (kind and kind.startswith(b"multipart")):
                body = MSGPACK.encode(request)  # with the query; a form has a boundary by chance
            return await self._once(visit, route, key, body, request, job)
        return await self._run(visit, route, request, job)

    async def _once(  # noqa: PLR0917 what `_task` has at hand
        self,
        visit: Visit,
        route: TaskRoute,
        key: bytes,
        body: bytes,
        request: msgspec.Struct,
        job: Job,
    ) -> Response:
        """As `_run`, once among all requests with the key."""
        asked = once(key, job.tenant, route.path, body, job.deadline_s)
        if self._idempotency is None:
            raise QueueUnavailable(f"{HEADER}: this server keeps no answers")

        async def run() -> Response:
            try:
                return await self._run(visit, route, request, job)
            except CallerError as error:  # the same again would be as wrong
                return self._failed(error, visit, route, route.path)

        return await self._idempotency.answer(asked, run)

    async def _run(
        self, visit: Visit, route: TaskRoute, request: msgspec.Struct, job: Job
    ) -> Response:
        try:
            answer = await self._submits.run(job)
        except CallerError as error:
            place_in_request(job, error)
            raise _renamed(error, route, request) from error
        made = route.answer(request, job, in_request(job, answer), visit.form)
        speed = None
        tokens = answer.tokens
        if job.task == "generate":
            texts = wholes(job, answer)
            waited_s = answer.timing.queue_s + answer.timing.load_s
            speed = speed_of(texts, waited_s + min(one.first_token_s for one in texts))
            tokens = self._traffic.add_texts(route.name, job, texts, speed)
        self._traffic.add_work(route.name, n_inputs(job.inputs), tokens)
        timing = [(b"server-timing", server_timing(answer.timing, speed))]
        faults = (failure.error() for failure in answer.failures.values())
        final = all(isinstance(fault, CallerError) for fault in faults)
        if isinstance(made, Text):
            return Response(200, made.content_type, made.body.encode(), timing, final)
        return Response(200, visit.form.content_type, visit.form.encode(made), timing, final)

    async def _stream(
        self,
        visit: Visit,
        route: TaskRoute,
        request: msgspec.Struct,
        job: Job,
        telling: Telling,
    ) -> Response:
        """What ends an answer that is sent while it grows: an ordinary one if it never began."""
        told = Told(visit, telling)
        try:
            async with aclosing(self._submits.stream(job)) as events:
                end = await told.tell(events)
        except CallerError as error:
            raise _renamed(error, route, request) from error
        tokens = self._traffic.add_texts(route.name, job, told.texts, told.speed)
        self._traffic.add_work(route.name, n_inputs(job.inputs), tokens)
        return Response(200, CONTENT_TYPE, end)

    def _ask(self, visit: Visit) -> Ask:
        return ask(visit.headers, visit.id, self._catalog(), self._settings, self._lanes)

    def _failed(
        self, error: ShoalError, visit: Visit, route: TaskRoute | PageRoute | None, path: str
    ) -> Response:
        shape: Shape = "openai"
        headers = error_headers(error)
        if route is not None:
            shape = route.shape
            if isinstance(error, MethodNotAllowed):
                allowed = b"POST" if isinstance(route, TaskRoute) else b"GET, HEAD"
                headers = [(b"allow", allowed)]
        if isinstance(error, CapacityError) and error.http_status in (429, 503):
            self._traffic.add_refusal(error.code)
        if error.http_status >= 500:
            log.warning("request %s to %r: %s: %s", visit.id, path[:128], error.code, error.message)
        if visit.streamed_bytes is not None:
            return Response(error.http_status, CONTENT_TYPE, error_frame(error, shape, visit.id))
        body = visit.form.encode(error_body(error, shape, visit.id))
        return Response(error.http_status, visit.form.content_type, body, headers)


def _renamed(error: CallerError, route: TaskRoute, request: msgspec.Struct) -> CallerError:
    """A worker's error with what it names under the name that this route has for it."""
    param = error.param
    if param is None:
        return error
    if route.fields is not None:
        name = route.fields(request, param)
    else:
        match = _INPUTS.fullmatch(param)
        if match is None:
            return error
        field = route.inputs
        value: Any = getattr(request, field)
        if value is None:  # /v1/score has two names for its texts
            field = "documents"
        name = field if isinstance(value, str | File) else field + match[1]
    message = error.message.replace(f"`{param}`", f"`{name}`")
    return type(error)(message, param=name, retry_after_s=error.retry_after_s)


def _telling(
    stream: Callable[[Any, Job], Telling], request: msgspec.Struct, job: Job, key: bytes | None
) -> Telling | None:
    """How the answer is told while it grows; None where it is wanted whole."""
    asked = job.params.generation
    if asked is None or not asked.stream:
        return None
    if key is not None:
        raise InvalidRequest(f"{HEADER}: a stream is not kept for a retry", param=HEADER)
    return stream(request, job)


async def _send(visit: Visit, response: Response) -> None:
    body = response.body
    if visit.streamed_bytes is not None:
        await visit.send({"type": "http.response.body", "body": body})
        return
    early = not visit.body_read
    if visit.short_way is not None and not early:
        head = b"content-type: %b\r\ncontent-length: %d\r\nx-request-id: %b\r\n" % (
            response.content_type,
            len(body),
            visit.id.encode(),
        )
        for header in response.headers:
            head += b"%b: %b\r\n" % header
        if visit.short_way.answer(response.status, head, body):
            return
    headers = [
        (b"content-type", response.content_type),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", visit.id.encode()),
        *response.headers,
    ]
    if early:
        headers.append((b"connection", b"close"))
    send = visit.send
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    if early:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await visit.linger()
        await send({"type": "http.response.body"})
    else:
        await send({"type": "http.response.body", "body": body})
