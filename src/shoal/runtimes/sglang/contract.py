"""SGLang's native HTTP contract: the messages that are used of it, and one client for them.

Owns paths, bodies, the form of a stream, and turning the server's words of refusal into errors.
The server runs with `--incremental-streaming-output`: each message of a stream has what is new in
it, so that a long text costs its length and not its square. Does not own the server (`server`) or
what a text is asked for (`texts`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

import msgspec

from shoal.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelUnavailable,
    RunFailed,
    ShoalError,
)

_CONNECT_S = 5.0
_CONTROL_S = 20.0
_WORK_S = 120.0
_DATA = "data: "
_DONE = "[DONE]"
_OURS = (401, 403)  # the key is ours, not a caller's

T = TypeVar("T")

Logprob = tuple[float | None, int, str | None]


class Finish(msgspec.Struct, frozen=True):
    """Why a text has ended. type: `stop`, `length` or `abort`; the others say more of the last."""

    type: str
    message: str | None = None
    status_code: int | None = None


class Meta(msgspec.Struct, frozen=True):
    """What is said beside a text. completion_tokens counts from the text's beginning."""

    completion_tokens: int = 0
    finish_reason: Finish | None = None
    output_token_logprobs: list[Logprob] = []
    output_top_logprobs: list[list[Logprob] | None] = []


class ErrorText(msgspec.Struct, frozen=True):
    """A refusal. code: an HTTP status."""

    message: str
    code: int | None = None


class Chunk(msgspec.Struct, frozen=True):
    """A message of a stream: what is new in its text, or an error."""

    text: str = ""
    meta_info: Meta = Meta()
    error: ErrorText | None = None


class Embedding(msgspec.Struct, frozen=True):
    """An answer of `/encode`."""

    embedding: list[float]


class MemoryUsage(msgspec.Struct, frozen=True):
    """Gibibytes that the server holds on its device."""

    weight: float = 0.0
    kvcache: float = 0.0


class State(msgspec.Struct, frozen=True):
    """What the scheduler says of itself."""

    memory_usage: MemoryUsage = MemoryUsage()


class ServerInfo(msgspec.Struct, frozen=True):
    """What is used of `/server_info`. max_req_input_len: the first length that is refused."""

    version: str
    model_path: str
    max_total_num_tokens: int
    max_running_requests: int
    max_req_input_len: int
    internal_states: list[State] = []


class _Refusal(msgspec.Struct, frozen=True):
    error: ErrorText | None = None
    error_message: str | None = None


class Broken(RunFailed):
    """A connection ended before its answer did: a fault of this request, or the server is gone."""


_chunk = msgspec.json.Decoder(Chunk).decode
_info = msgspec.json.Decoder(ServerInfo).decode
_embeddings = msgspec.json.Decoder(list[Embedding]).decode
_refusal = msgspec.json.Decoder(_Refusal).decode


class Contract:
    """Calls to one server at `address` (`http://127.0.0.1:<port>`) that knows `key`.

    work_s, control_s: how long an answer may take that is computed for, and any other.
    Every method raises `Broken` where the connection ends early, `DeadlineExceeded` where the
    server takes too long, and `RunFailed` for an answer that is none. Used by one event loop.
    """

    def __init__(
        self, address: str, key: str, work_s: float = _WORK_S, control_s: float = _CONTROL_S
    ) -> None:
        self._work_s = work_s
        self._control_s = control_s
        # Whoever calls bounds how many calls are open; a pool of ours would let them wait unseen.
        # None is used twice: the server closes one after a fault of its own, or when it was idle.
        import httpx  # only where there is a server to be asked

        self._broken = httpx.TransportError
        self._http = httpx.AsyncClient(
            base_url=address,
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    async def close(self) -> None:
        """Closes its connections; what is streamed ends."""
        await self._http.aclose()

    async def ready(self, model_path: str) -> ServerInfo | None:
        """What the server says of itself once it takes requests for a model; None before.

        Another server that listens at the address is none that is ready.
        """
        try:
            await self._call("GET", "/ready", None, self._control_s)
            info = _read(_info, await self._call("GET", "/server_info", None, self._control_s))
        except ShoalError:
            return None
        return info if info.model_path == model_path else None

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        """`/generate`: what a text grows by. Raises what `refused` makes of a refusal."""
        try:
            async with self._http.stream("POST", "/generate", json=body) as answer:
                if answer.status_code != 200:
                    raise refused(answer.status_code, await answer.aread())
                async for line in answer.aiter_lines():
                    if line.startswith(_DATA) and line != _DATA + _DONE:
                        yield _read(_chunk, line[len(_DATA) :])
        except self._broken as error:
            raise Broken(f"SGLang broke off: {error!r}") from error
        raise Broken("SGLang ended a text early")

    async def abort(self, rid: str) -> None:
        """`/abort_request`: ends a text by the name it was started with."""
        await self._call("POST", "/abort_request", {"rid": rid}, self._control_s)

    async def encode(self, ids: list[list[int]]) -> list[list[float]]:
        """`/encode`: a vector for each sequence of token ids."""
        answer = await self._call("POST", "/encode", {"input_ids": ids}, self._work_s)
        vectors = [one.embedding for one in _read(_embeddings, answer)]
        if len(vectors) != len(ids):
            raise RunFailed(f"SGLang answered {len(ids)} sequences with {len(vectors)} vectors")
        return vectors

    async def load_adapter(self, name: str, folder: str) -> None:
        """`/load_lora_adapter`. Raises `ModelUnavailable` with the server's reason."""
        body = {"lora_name": name, "lora_path": folder}
        try:
            await self._call("POST", "/load_lora_adapter", body, self._work_s)
        except Broken:
            raise
        except (InvalidRequest, RunFailed) as error:
            raise ModelUnavailable(f"{name} does not load: {error.message}") from error

    async def unload_adapter(self, name: str) -> None:
        """`/unload_lora_adapter`; it waits for the texts that grow with the adapter."""
        await self._call("POST", "/unload_lora_adapter", {"lora_name": name}, self._control_s)

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None, most_s: float
    ) -> bytes:
        try:
            async with asyncio.timeout(most_s):
                answer = await self._http.request(method, path, json=body)
        except TimeoutError as error:
            raise DeadlineExceeded(f"SGLang gave no answer in {most_s:.0f} s") from error
        except self._broken as error:
            raise Broken(f"SGLang broke off: {error!r}") from error
        if answer.status_code != 200:
            raise refused(answer.status_code, answer.content)
        return answer.content


def _read(decode: Callable[[bytes | str], T], answer: bytes | str) -> T:
    try:
        return decode(answer)
    except msgspec.DecodeError as error:
        raise RunFailed(f"SGLang answered what cannot be read: {error}") from error


def refused(status: int, body: bytes) -> ShoalError:
    """The error that an answer which is not 200 stands for."""
    try:
        said = _refusal(body)
        text = said.error.message if said.error else said.error_message
    except msgspec.DecodeError:
        text = None
    return failure(status, text or body.decode("utf-8", "replace")[:400])


def failure(status: int | None, text: str) -> ShoalError:
    """The error of a status and its text: the caller's for 4xx, else the server's."""
    if status is None or not 400 <= status < 500 or status in _OURS:
        return RunFailed(f"SGLang: {text}")
    # The only texts of a caller that reach its grammar compiler are schemas.
    return InvalidRequest(f"SGLang: {text}", param="schema" if "grammar" in text else None)
