"""SGLang's native HTTP contract: the messages that are used of it, and one client for them.

Owns paths, bodies, the form of a stream, and turning the server's words of refusal into errors.
The server runs with `--incremental-streaming-output`: each message of a stream has what is new in
it, so that a long text costs its length and not its square. Does not own the server (`server`) or
what a text is asked for (`texts`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec

from shoal.errors import InvalidRequest, ModelUnavailable, RunFailed, RuntimeCrashed, ShoalError

_CONNECT_S = 5.0
_CONTROL_S = 120.0
_DATA = "data: "
_DONE = "[DONE]"

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
    """A refusal."""

    message: str


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
    max_total_num_tokens: int
    max_running_requests: int
    max_req_input_len: int
    internal_states: list[State] = []


class _Refusal(msgspec.Struct, frozen=True):
    error: ErrorText | None = None
    error_message: str | None = None


_chunk = msgspec.json.Decoder(Chunk).decode
_info = msgspec.json.Decoder(ServerInfo).decode
_embeddings = msgspec.json.Decoder(list[Embedding]).decode
_refusal = msgspec.json.Decoder(_Refusal).decode


class Contract:
    """Calls to one server at `address` (`http://127.0.0.1:<port>`).

    Every method raises `RuntimeCrashed` where the server cannot be reached. Used by one event loop.
    """

    def __init__(self, address: str) -> None:
        # Whoever calls bounds how many calls are open; a pool of ours would let them wait unseen.
        self._http = httpx.AsyncClient(
            base_url=address,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=16),
            trust_env=False,
        )

    async def close(self) -> None:
        """Closes its connections; what is streamed ends."""
        await self._http.aclose()

    async def ready(self) -> bool:
        """Whether the server takes requests."""
        try:
            return (await self._http.get("/ready", timeout=_CONNECT_S)).status_code == 200
        except httpx.TransportError:
            return False

    async def info(self) -> ServerInfo:
        """Its capacity."""
        return _info(await self._call("GET", "/server_info", None))

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        """`/generate`: what a text grows by. Raises what `refused` makes of a refusal."""
        try:
            async with self._http.stream("POST", "/generate", json=body) as answer:
                if answer.status_code != 200:
                    raise refused(answer.status_code, await answer.aread())
                async for line in answer.aiter_lines():
                    if line.startswith(_DATA) and line != _DATA + _DONE:
                        yield _chunk(line[len(_DATA) :])
        except httpx.TransportError as error:
            raise RuntimeCrashed(f"the SGLang server went away: {error!r}") from error

    async def abort(self, rid: str) -> None:
        """`/abort_request`: ends a text by the name it was started with."""
        await self._call("POST", "/abort_request", {"rid": rid})

    async def encode(self, ids: list[list[int]]) -> list[list[float]]:
        """`/encode`: a vector for each sequence of token ids."""
        answers = _embeddings(await self._call("POST", "/encode", {"input_ids": ids}))
        return [answer.embedding for answer in answers]

    async def load_adapter(self, name: str, folder: str) -> None:
        """`/load_lora_adapter`. Raises `ModelUnavailable` with the server's reason."""
        body = {"lora_name": name, "lora_path": folder}
        try:
            await self._call("POST", "/load_lora_adapter", body)
        except (InvalidRequest, RunFailed) as error:
            raise ModelUnavailable(f"{name} does not load: {error.message}") from error

    async def unload_adapter(self, name: str) -> None:
        """`/unload_lora_adapter`."""
        await self._call("POST", "/unload_lora_adapter", {"lora_name": name})

    async def _call(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        try:
            answer = await self._http.request(method, path, json=body, timeout=_CONTROL_S)
        except httpx.TransportError as error:
            raise RuntimeCrashed(f"the SGLang server went away: {error!r}") from error
        if answer.status_code != 200:
            raise refused(answer.status_code, answer.content)
        return answer.content


def refused(status: int, body: bytes) -> ShoalError:
    """The error that an answer which is not 200 stands for."""
    try:
        said = _refusal(body)
        text = said.error.message if said.error else said.error_message
    except msgspec.DecodeError:
        text = None
    return failure(status, text or body.decode("utf-8", "replace")[:400])


def failure(status: int | None, text: str) -> ShoalError:
    """The error of a status and its text: the caller's for 400, else the server's."""
    if status != 400:
        return RunFailed(f"SGLang: {text}")
    # The only texts of a caller that reach its grammar compiler are schemas.
    return InvalidRequest(f"SGLang: {text}", param="schema" if "grammar" in text else None)
