"""Records what a real SGLang server answers, for `sglang_replay`.

    <python of the bundle sglang> -m tests.support.sglang_record MODEL ADAPTER OUT.json

Drives the runtime through every exchange that the tests replay, and writes each request with its
answer, short of names and numbers that differ from one run to the next.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path

import httpx

from shoal.errors import ShoalError
from shoal.ipc.messages import AdapterSpec, ModelSpec
from shoal.runtimes.sglang.contract import Contract
from shoal.runtimes.sglang.runtime import SglangRuntime
from shoal.wire.generation import Piece
from tests.support.sglang_cases import ADAPTER, CASES, KEY, OPTIONS, WRITTEN, case

_KEPT = ("completion_tokens", "finish_reason", "output_token_logprobs", "output_top_logprobs")
_INFO = (
    "version",
    "model_path",
    "max_total_num_tokens",
    "max_running_requests",
    "max_req_input_len",
)
EXCHANGES: list[dict[str, object]] = []


class Tee(httpx.AsyncBaseTransport):
    """Notes each request and its answer."""

    def __init__(self) -> None:
        self._inner = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await self._inner.handle_async_request(request)
        body = json.loads(request.content or b"null")
        parts: list[bytes] = []
        if request.url.path != "/ready":
            about = {"path": request.url.path, "body": body, "status": answer.status_code}
            EXCHANGES.append({**about, "parts": parts})
        return httpx.Response(
            answer.status_code, headers=answer.headers, stream=Noted(answer, parts)
        )


class Noted(httpx.AsyncByteStream):
    def __init__(self, answer: httpx.Response, parts: list[bytes]) -> None:
        self._answer = answer
        self._parts = parts

    async def __aiter__(self):
        async for part in self._answer.aiter_raw():
            self._parts.append(part)
            yield part

    async def aclose(self) -> None:
        await self._answer.aclose()


def short(path: str, text: str) -> str:
    """An answer without what no test reads."""
    if path == "/server_info":
        info = json.loads(text)
        usage = [{"memory_usage": one["memory_usage"]} for one in info["internal_states"]]
        return json.dumps({**{name: info[name] for name in _INFO}, "internal_states": usage})
    if not text.startswith("data: "):
        return text
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    return "".join(f"data: {_short_event(event)}\n\n" for event in events)


def _short_event(event: str) -> str:
    if event == "[DONE]":
        return event
    read = json.loads(event)
    if "meta_info" in read:
        meta = read["meta_info"]
        read = {"text": read["text"], "meta_info": {n: meta[n] for n in _KEPT if n in meta}}
    return json.dumps(read)


def grown(runtime: SglangRuntime, name: str) -> None:
    """Lets one text grow to its end; stops it early where its case says so."""
    ended, pieces = threading.Event(), 0

    def emit(what: object) -> None:
        nonlocal pieces
        if not isinstance(what, Piece):
            print(name, what, file=sys.stderr)  # noqa: T201
            ended.set()
            return
        pieces += 1
        if pieces == CASES[name].stop_after:
            runtime.stop(name)

    try:
        runtime.start(KEY, case(name), emit)
        ended.wait(120)
    except ShoalError as error:
        print(name, repr(error), file=sys.stderr)  # noqa: T201


def main(model: Path, adapter: Path, out: Path) -> None:
    """Records everything."""
    plain = Contract.__init__

    def noted(contract: Contract, address: str, key: str) -> None:
        plain(contract, address, key)
        contract._http = httpx.AsyncClient(
            base_url=address,
            headers=contract._http.headers,
            transport=Tee(),
            timeout=None,  # noqa: S113
        )

    Contract.__init__ = noted  # type: ignore[method-assign]
    runtime = SglangRuntime(device="cpu", threads=1)
    runtime.load(
        ModelSpec(KEY, str(model), "/nowhere", ["generate"], max_tokens=128, options=OPTIONS)
    )
    runtime.load_adapter(KEY, AdapterSpec(ADAPTER, str(adapter)))
    for name in (name for name in CASES if name not in WRITTEN):
        grown(runtime, name)
    runtime.unload_adapter(KEY, ADAPTER)
    asyncio.run(asyncio.sleep(1))
    lines = []
    for exchange in EXCHANGES:
        answer = short(str(exchange["path"]), b"".join(exchange.pop("parts")).decode())
        for name in ("rid", "lora_path"):
            if isinstance(exchange["body"], dict) and (
                exchange["path"] != "/generate" or name == "rid"
            ):
                exchange["body"].pop(name, None)
        lines.append(json.dumps({**exchange, "answer": answer}))
    out.write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")
    runtime.unload(KEY)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
