"""The runtime `sglang`: one SGLang server for each model, started, watched and spoken to.

Owns which server is whose, the one event loop on which they are spoken to, and leaving with a
server that dies: the worker sees that, tells the clients, and starts another process. Does not own
a server's process (`server`), its contract (`contract`) or its texts (`texts`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from shoal.core.types import Task
from shoal.errors import (
    CapacityError,
    InvalidRequest,
    ModelUnavailable,
    OutOfMemory,
    RunFailed,
    RuntimeCrashed,
    ShoalError,
)
from shoal.ipc.facts import Adapts
from shoal.ipc.messages import AdapterSpec, ModelSpec, RunItem, Traits
from shoal.runtimes.bert import read_config
from shoal.runtimes.checkpoint import INDEX, locate
from shoal.runtimes.generating import own_sampling
from shoal.runtimes.interface import Capacity, Emit, RanItems
from shoal.runtimes.prompts import Prompts, of_folder
from shoal.runtimes.sglang import adapters, command, gguf
from shoal.runtimes.sglang.contract import Broken, Contract, ServerInfo
from shoal.runtimes.sglang.embedder import Embedder
from shoal.runtimes.sglang.server import Server, free_port
from shoal.runtimes.sglang.texts import OWN, Limits, Text, sampling
from shoal.runtimes.unpacked import unpacked
from shoal.wire.generation import Generated, Generation, Piece

LOST_STATUS = 70
_CURE = "shoal bundles build sglang"
# A server that dies breaks off first, and is gone a moment later.
_LEAVES_S = 1.0
_GIB = 1024**3

T = TypeVar("T")
Body = dict[str, Any]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Growing:
    """A text that grows. rid: the server's name for it: an item may come a second time."""

    item: str
    rid: str
    text: Text
    task: asyncio.Task[None]


@dataclass(slots=True)
class Served:
    """A model with its server. texts: those that grow, by the server's names for them.

    prompts: None for an encoder. adapters: their bytes by their keys, 0 where the server did not
    say whether it has one.
    """

    spec: ModelSpec
    plan: command.Plan
    server: Server
    contract: Contract
    info: ServerInfo
    tokenizer: Any
    prompts: Prompts | None
    limits: Limits
    folder: Path
    memory_bytes: int
    embedder: Embedder | None = None
    adapters: dict[str, int] = field(default_factory=dict)
    texts: dict[str, Growing] = field(default_factory=dict)


class SglangRuntime:
    """Models on SGLang servers. Raises `RuntimeUnavailable` where SGLang is not installed."""

    name = "sglang"
    needs: ClassVar[dict[str, str]] = dict.fromkeys(
        ("sglang", "torch", "httpx", "tokenizers", "jinja2"), _CURE
    )
    tasks: ClassVar[tuple[Task, ...]] = ("generate", "encode")
    adapts: ClassVar[Adapts] = Adapts(tasks=["generate"], usual=command.USUAL_ADAPTERS)

    def __init__(
        self,
        *,
        device: str,
        threads: int,
        on_lost: Callable[[], None] = lambda: os._exit(LOST_STATUS),
        module: str = "sglang.launch_server",
    ) -> None:
        del threads  # the server has read them from its environment
        try:
            self.version = version("sglang")
        except PackageNotFoundError:
            self.version = "none"
        self.traits = Traits(accepts_ids=False, tasks=list(self.tasks), lora=True, streams=True)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells of each request
        self._device = device
        self._on_lost = on_lost
        self._module = module
        self._models: dict[str, Served] = {}
        self._numbers = itertools.count()
        self._ending: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="sglang", daemon=True).start()

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def load(self, spec: ModelSpec) -> bool:
        """Starts a server for a model and waits until it is ready; nothing is ever kept of one.

        Raises `ModelUnavailable` or `OutOfMemory`.
        """
        self.unload(spec.key)
        plan = command.plan(spec, self._device)
        folder = self._folder(spec)
        config = read_config(folder)
        command.check(spec, config)
        port = free_port()
        server = Server(
            spec.key,
            command.arguments(spec, folder, config, plan, port),
            command.environment(self._device),
            self._on_lost,
            self._module,
        )
        contract = Contract(f"http://127.0.0.1:{port}", server.key)
        try:
            self._models[spec.key] = self._served(spec, plan, folder, server, contract)
        except BaseException:  # task root: nothing of a load that fails stays
            server.stop()
            self._wait(contract.close())
            raise
        return False

    def _folder(self, spec: ModelSpec) -> Path:
        """Where the weights lie as the server reads them. Raises `ModelUnavailable`."""
        usual = ("model.safetensors", f"model{INDEX}")
        weights = locate(spec, usual)
        if weights.suffix == ".gguf":
            return unpacked(spec.key, weights, Path(spec.cache_dir), gguf.MODULE)
        if weights.name not in usual:
            raise ModelUnavailable(f"{spec.key}: {weights} is neither safetensors nor GGUF")
        folder = weights.parent
        for name in ("config.json", "tokenizer.json"):
            if not (folder / name).is_file():
                raise ModelUnavailable(f"{spec.key}: {folder} has no {name}")
        for file in folder.glob("*.safetensors"):
            _check_whole(spec.key, file)
        return folder

    def _served(
        self, spec: ModelSpec, plan: command.Plan, folder: Path, server: Server, contract: Contract
    ) -> Served:
        from tokenizers import Tokenizer

        info = server.wait_ready(lambda: self._wait(contract.ready(str(folder))))
        tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        most = info.max_req_input_len - 1
        embedder = None
        if spec.tasks == ["encode"]:
            embedder = Embedder(
                spec, folder, most, lambda ids: self._ask(server, contract.encode(ids))
            )
        return Served(
            *(spec, plan, server, contract, info, tokenizer),
            prompts=None if embedder else of_folder(spec.key, folder),
            limits=Limits(
                *(spec.key, spec.max_tokens, most, own_sampling(folder, OWN)), seeds=plan.seeds
            ),
            folder=folder,
            memory_bytes=self._held_bytes(server, info),
            embedder=embedder,
        )

    def _held_bytes(self, server: Server, info: ServerInfo) -> int:
        """What a server takes of its device's memory; on a CPU, of the host's."""
        if self._device.startswith("cpu"):
            return server.memory_bytes()
        used = [state.memory_usage for state in info.internal_states]
        return int(sum(one.weight + one.kvcache for one in used) * _GIB)

    def unload(self, key: str, *, keep: bool = False) -> None:
        """Ends a model's server; texts that still grow are cancelled."""
        del keep  # there is no host tier
        served = self._models.pop(key, None)
        if served is not None:
            self._wait(self._end(served))
            served.server.stop()

    async def _end(self, served: Served) -> None:
        growing = list(served.texts.values())
        for one in growing:
            one.text.end("cancelled")
            one.task.cancel()
        await asyncio.gather(*(one.task for one in growing), return_exceptions=True)
        await served.contract.close()

    def run(self, key: str, items: Sequence[RunItem], block_tokens: int | None = None) -> RanItems:
        """Runs items of a loaded encoder; the server forms its own passes."""
        del block_tokens
        served = self._model(key)
        if served.embedder is None:
            refusal = InvalidRequest(f"{key} only generates", param="model")
            return RanItems([refusal] * len(items), 0)
        return served.embedder.run(items)

    def memory(self) -> dict[str, int]:
        """What each server held when its model was loaded."""
        return {key: served.memory_bytes for key, served in self._models.items()}

    def capacity(self, key: str) -> Capacity:
        """As the server says of itself."""
        info = self._model(key).info
        slots = min(info.max_running_requests, self._model(key).plan.slots)
        return Capacity(slots, info.max_total_num_tokens)

    def start(self, key: str, item: RunItem, emit: Emit) -> None:
        """Begins a text. Raises `CapacityError` beyond the slots, `InvalidRequest` and its kind."""
        served = self._model(key)
        if served.prompts is None:
            raise InvalidRequest(f"{key} does not generate", param="model")
        asked = item.params.generation or Generation()
        prompt = served.prompts.prompt(item)
        ids: list[int] = served.tokenizer.encode(prompt, add_special_tokens=False).ids
        if item.adapter and not served.adapters.get(item.adapter):
            raise ModelUnavailable(f"{item.adapter} is not loaded")
        body: Body = {
            "input_ids": ids,
            "sampling_params": sampling(asked, len(ids), served.limits),
            "stream": True,
        }
        if asked.logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": asked.logprobs}
            body["return_text_in_logprobs"] = True
        if item.adapter:
            body["lora_path"] = item.adapter
        growth = partial(Text, asked, prompt_tokens=len(ids))
        self._wait(self._begin(served, item.item, growth, emit, body))

    async def _begin(
        self, served: Served, item: str, growth: Callable[[Emit], Text], emit: Emit, body: Body
    ) -> None:
        if len(served.texts) >= served.plan.slots:
            raise CapacityError(f"{served.spec.key} has no slot free")
        rid = f"{item}-{next(self._numbers)}"

        def told(what: Piece | Generated | ShoalError) -> None:
            if not isinstance(what, Piece):
                served.texts.pop(rid, None)  # whoever is told of an end may begin the next at once
            emit(what)

        text = growth(told)
        task = asyncio.create_task(self._grow(served, text, body | {"rid": rid}), name=rid)
        served.texts[rid] = Growing(item, rid, text, task)

    async def _grow(self, served: Served, text: Text, body: Body) -> None:
        try:
            async with aclosing(served.contract.stream(body)) as chunks:
                async for chunk in chunks:
                    text.take(chunk)
                    if text.ended:
                        return
        except Broken as error:
            text.fail(await asyncio.to_thread(self._judged, served.server, error))
        except ShoalError as error:
            text.fail(error)
        except Exception as error:  # task root
            log.exception("a text of %s was lost", served.spec.key)
            text.fail(RunFailed(f"{served.spec.key}: {type(error).__name__}: {error}"))

    def _judged(self, server: Server, error: Broken) -> ShoalError:
        """What a broken connection means: this process leaves with a server that is gone."""
        if server.lost.wait(_LEAVES_S):
            return RuntimeCrashed(f"the SGLang server died: {error.message}")
        return error

    def _ask(self, server: Server, call: Coroutine[Any, Any, T]) -> T:
        try:
            return self._wait(call)
        except Broken as error:
            raise self._judged(server, error) from error

    def stop(self, item: str) -> None:
        """Ends a text early."""
        self._loop.call_soon_threadsafe(self._stop, item)

    def _stop(self, item: str) -> None:
        for served in list(self._models.values()):
            for growing in [one for one in served.texts.values() if one.item == item]:
                growing.text.end("cancelled")
                ending = self._loop.create_task(self._abort(served, growing))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)

    async def _abort(self, served: Served, growing: Growing) -> None:
        with suppress(ShoalError):  # it may be gone with its server
            await served.contract.abort(growing.rid)
        growing.task.cancel()

    def load_adapter(self, key: str, adapter: AdapterSpec) -> int:
        """Makes an adapter ready, under its key; its bytes. Raises `ModelUnavailable`.

        `OutOfMemory` where the model holds as many as it was loaded with room for.
        """
        served = self._model(key)
        most = served.plan.adapters
        if not most:
            raise ModelUnavailable(
                f"{key} was loaded without room for adapters: option `max_adapters`"
            )
        size_bytes = adapters.check(
            adapter, adapters.shapes_of(served.folder), served.plan.adapter_rank
        )
        self.unload_adapter(key, adapter.key)
        if len(served.adapters) >= most:
            raise OutOfMemory(f"{key} holds {most} adapters, as many as it has room for")
        served.adapters[adapter.key] = 0  # if there is no answer, the server may have it or not
        try:
            folder = adapters.view(adapter, served.server.folder)
            self._ask(served.server, served.contract.load_adapter(adapter.key, str(folder)))
        except (ModelUnavailable, OSError):
            self._forget(served, adapter.key)
            raise
        served.adapters[adapter.key] = size_bytes
        return size_bytes

    def unload_adapter(self, key: str, adapter: str) -> None:
        """Forgets an adapter."""
        served = self._models.get(key)
        if served is None or adapter not in served.adapters:
            return
        try:
            self._ask(served.server, served.contract.unload_adapter(adapter))
        except InvalidRequest as error:  # it does not have it
            log.info("%s: %s", key, error.message)
        self._forget(served, adapter)

    def _forget(self, served: Served, adapter: str) -> None:
        del served.adapters[adapter]
        adapters.remove_view(adapter, served.server.folder)

    def _model(self, key: str) -> Served:
        served = self._models.get(key)
        if served is None:
            raise ModelUnavailable(f"{key} is not loaded")
        return served


def _check_whole(key: str, file: Path) -> None:
    """Raises `ModelUnavailable` for a file that is cut short, which a server finds out late."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            pass
    except SafetensorError as error:
        raise ModelUnavailable(f"{key}: {file} is cut short or damaged: {error}") from error
