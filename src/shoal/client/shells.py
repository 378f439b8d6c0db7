"""The two clients: the same calls, sent with and without `await`.

Owns the connections (httpx) and driving an exchange. Does not own any call (`core`) or decision
(`exchange`): `_sync` and `_async` turn each method of `Core` into a method of a client, with its
signature and docstring.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar, cast
from urllib.parse import urlsplit

import httpx

from shoal import __version__, clock
from shoal.client.core import Core, Options
from shoal.client.exchange import Call, Lost, Policy, Reply, Send, Sleep, exchange
from shoal.client.growing import AsyncGrowing, Growing
from shoal.client.spread import GROWING, AsyncSpread, Spread

DEFAULT_URL = "http://127.0.0.1:8080"
MAX_CONNECTIONS = 256

_EARLY = {GROWING: True}

P = ParamSpec("P")
T = TypeVar("T")


def _sync(build: Callable[Concatenate[Core, P], Call[T]]) -> Callable[Concatenate[Any, P], T]:
    @wraps(build)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(build(self._core, *args, **kwargs))

    return method


def _async(
    build: Callable[Concatenate[Core, P], Call[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    @wraps(build)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(build(self._core, *args, **kwargs))

    return method


def _sync_growing(
    build: Callable[Concatenate[Core, P], Call[Any]],
) -> Callable[Concatenate[Any, P], Growing]:
    @wraps(build)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Growing:
        return self._grow(build(self._core, *args, **kwargs))

    return method


def _async_growing(
    build: Callable[Concatenate[Core, P], Call[Any]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, AsyncGrowing]]:
    @wraps(build)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncGrowing:
        return await self._grow(build(self._core, *args, **kwargs))

    return method


class _Shell:
    """What both clients are given.

    base_url: address of the server. timeout_s: time for a call with all its tries.
    lane: a lane of the server's; None leaves it to the server. max_retries: tries after the first,
    for a full or absent server. idempotency_key: `auto` gives every call one (see `Options`).
    headers: sent with every request.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        timeout_s: float = 60.0,
        lane: str | None = None,
        max_retries: int = 4,
        idempotency_key: Literal["auto"] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._policy = Policy(timeout_s, max_retries)
        self._rng = random.Random()  # noqa: S311  # jitter, no secret
        options = Options() if lane is None else Options(lane=lane)
        if idempotency_key is not None:
            options["idempotency_key"] = idempotency_key
        self._core = Core(options)
        self._connection: dict[str, Any] = {
            "base_url": self.base_url,
            "headers": {"user-agent": f"shoal/{__version__}", **(headers or {})},
            # A proxy from the environment is for other machines than this one.
            "trust_env": urlsplit(self.base_url).hostname not in ("127.0.0.1", "localhost", "::1"),
            "verify": httpx.create_ssl_context(),
        }
        self._open()

    def _open(self) -> None:
        raise NotImplementedError

    def _exchange(self, call: Call[T]) -> Generator[Send | Sleep, Reply | Lost | None, T]:
        return exchange(call, self._policy, clock.monotonic, self._rng)


class Client(_Shell):
    """A client for threads; use it in a `with` block, or close it. Errors are `shoal.errors`."""

    encode = _sync(Core.encode)
    encode_sparse = _sync(Core.encode_sparse)
    encode_outputs = _sync(Core.encode_outputs)
    score = _sync(Core.score)
    rerank = _sync(Core.rerank)
    classify = _sync(Core.classify)
    extract = _sync(Core.extract)
    transcribe = _sync(Core.transcribe)
    generate = _sync(Core.generate)
    chat = _sync(Core.chat)
    generate_stream = _sync_growing(Core.generate_stream)
    chat_stream = _sync_growing(Core.chat_stream)
    models = _sync(Core.models)
    model = _sync(Core.model)
    ready = _sync(Core.ready)

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        spread = Spread(MAX_CONNECTIONS, self._connection["verify"])
        self._http = httpx.Client(mounts={"all://": spread}, **self._connection)

    def _run(self, call: Call[T]) -> T:
        return self._drive(call, lambda step: _reply(self._http.request(**_request(step))))

    def _grow(self, call: Call[Any]) -> Growing:
        opened: list[httpx.Response] = []

        def send(step: Send) -> Reply:
            request = self._http.build_request(**_request(step), extensions=_EARLY)
            response = self._http.send(request, stream=True)
            if response.status_code not in call.good:
                response.read()
                return _reply(response)
            opened.append(response)
            return Reply(response.status_code, response.headers, b"")

        self._drive(call, send)
        return Growing(opened[-1])

    def _drive(self, call: Call[T], send: Callable[[Send], Reply]) -> T:
        steps = self._exchange(call)
        outcome: Reply | Lost | None = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as done:
                return cast("T", done.value)
            if isinstance(step, Sleep):
                time.sleep(step.for_s)
                outcome = None
                continue
            try:
                outcome = send(step)
            except httpx.TransportError as error:
                outcome = _lost(error, self.base_url)


class AsyncClient(_Shell):
    """A client for asyncio; use it in an `async with` block, or close it."""

    encode = _async(Core.encode)
    encode_sparse = _async(Core.encode_sparse)
    encode_outputs = _async(Core.encode_outputs)
    score = _async(Core.score)
    rerank = _async(Core.rerank)
    classify = _async(Core.classify)
    extract = _async(Core.extract)
    transcribe = _async(Core.transcribe)
    generate = _async(Core.generate)
    chat = _async(Core.chat)
    generate_stream = _async_growing(Core.generate_stream)
    chat_stream = _async_growing(Core.chat_stream)
    models = _async(Core.models)
    model = _async(Core.model)
    ready = _async(Core.ready)

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _open(self) -> None:
        spread = AsyncSpread(MAX_CONNECTIONS, self._connection["verify"])
        self._http = httpx.AsyncClient(mounts={"all://": spread}, **self._connection)

    async def _run(self, call: Call[T]) -> T:
        async def send(step: Send) -> Reply:
            return _reply(await self._http.request(**_request(step)))

        return await self._drive(call, send)

    async def _grow(self, call: Call[Any]) -> AsyncGrowing:
        opened: list[httpx.Response] = []

        async def send(step: Send) -> Reply:
            request = self._http.build_request(**_request(step), extensions=_EARLY)
            response = await self._http.send(request, stream=True)
            if response.status_code not in call.good:
                await response.aread()
                return _reply(response)
            opened.append(response)
            return Reply(response.status_code, response.headers, b"")

        await self._drive(call, send)
        return AsyncGrowing(opened[-1])

    async def _drive(self, call: Call[T], send: Callable[[Send], Awaitable[Reply]]) -> T:
        steps = self._exchange(call)
        outcome: Reply | Lost | None = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as done:
                return cast("T", done.value)
            if isinstance(step, Sleep):
                await asyncio.sleep(step.for_s)
                outcome = None
                continue
            try:
                outcome = await send(step)
            except httpx.TransportError as error:
                outcome = _lost(error, self.base_url)


def _request(step: Send) -> dict[str, Any]:
    return {
        "method": step.method,
        "url": step.path,
        "content": step.content,
        "headers": step.headers,
        "timeout": step.timeout_s,
    }


def _reply(response: httpx.Response) -> Reply:
    return Reply(response.status_code, response.headers, response.content)


def _lost(error: httpx.TransportError, address: str) -> Lost:
    late = isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout)
    return Lost(f"{address}: {type(error).__name__}: {error}", timed_out=late)
