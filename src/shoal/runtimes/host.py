"""A runtime process: hosts one runtime and answers the worker's calls.

    python -m shoal.runtimes.host --fd N --runtime NAME --device cpu --threads 1

Owns mapping what a runtime raises, splitting a lost batch to find its culprit, letting inputs at
fault fail alone where an item is `partial`, and measuring memory and time. Does not own queueing,
policy, or models (the runtime's).
"""

from __future__ import annotations

import argparse
import errno
import gc
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from typing import cast

import msgspec
import psutil
from msgspec import structs

from shoal.clock import monotonic
from shoal.errors import (
    Bug,
    ModelUnavailable,
    OutOfMemory,
    RunFailed,
    ShoalError,
    WeightsMissing,
    panics_as_errors,
)
from shoal.ipc.messages import (
    NO_CALL,
    Answer,
    AskMemory,
    Call,
    Failed,
    Hello,
    ItemDone,
    Load,
    LoadAdapter,
    Loaded,
    Memory,
    ModelSpec,
    Ran,
    Run,
    RunItem,
    Start,
    Stop,
    Unload,
    UnloadAdapter,
)
from shoal.ipc.priority import stand_back
from shoal.ipc.server import RuntimeServer, refuse
from shoal.runtimes.device import device_memory
from shoal.runtimes.growing import Growing
from shoal.runtimes.heap import give_back
from shoal.runtimes.held import held_bytes
from shoal.runtimes.inputs import alone
from shoal.runtimes.interface import Adapting, Generator, RanItems, Runtime
from shoal.runtimes.registry import create
from shoal.wire.envelope import EMPTY, Failure, Result

log = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode


class Host:
    """One runtime on one device, and the calls on it."""

    def __init__(self, runtime: Runtime, device: str = "cpu") -> None:
        self._runtime = runtime
        self._device = device
        self._process = psutil.Process()
        self._measured: dict[str, int] = {}
        self._growing = Growing(cast("Generator", runtime)) if runtime.traits.streams else None

    def hello(self) -> Hello:
        """Who we are."""
        r = self._runtime
        return Hello(r.name, r.version, self._process.pid, r.traits)

    def handle(self, call: Call, send: Callable[[Answer], None] = lambda _: None) -> Answer | None:
        """Answers one call, or begins what `send` will be called for; never raises."""
        try:
            with panics_as_errors():
                return self._answer(call, send)
        except ShoalError as error:
            failure = Failure.of(error)
        except Exception as error:  # task root
            log.exception("a call failed")
            failure = Failure.of(Bug(f"{type(error).__name__}: {error}"))
        if isinstance(call, Load):
            give_back()  # only now: the error held what was half loaded
        return Failed(call.seq, failure)

    def _answer(self, call: Call, send: Callable[[Answer], None]) -> Answer | None:
        match call:
            case Run():
                return self._run(call)
            case Start():
                self._generating().start(call, send)
                return None
            case Load():
                return self._load(call)
            case LoadAdapter():
                return self._load_adapter(call)
            case UnloadAdapter():
                self._adapting().unload_adapter(call.key, call.adapter)
            case Unload():
                self._runtime.unload(call.key, keep=call.keep)
                self._measured.pop(call.key, None)
        return self.memory(call.seq)

    def ask(self, call: AskMemory) -> Memory:
        """What the process holds; safe while a batch runs."""
        return self.memory(call.seq)

    def stop(self, call: Stop) -> None:
        """Ends what a `Start` began; safe from any thread."""
        if self._growing is not None:
            self._growing.stop(call.seq)

    def memory(self, seq: int) -> Memory:
        """What the process and its device hold, and each model as it was measured at its load."""
        device = device_memory(self._device)
        return Memory(
            seq,
            held_bytes(self._process),
            dict(self._measured),
            device_bytes=device.reserved_bytes,
            device_free_bytes=device.free_bytes,
            device_total_bytes=device.total_bytes,
        )

    def _load(self, call: Load) -> Loaded:
        spec = call.spec
        gc.collect()
        before_bytes, begun_s = self._held_bytes(), monotonic()
        warm = self._loaded(spec)
        own_bytes = self._runtime.memory().get(spec.key, 0)
        self._measured[spec.key] = max(self._held_bytes() - before_bytes, own_bytes)
        took_s = monotonic() - begun_s
        loaded = Loaded(call.seq, self._measured[spec.key], took_s, warm)
        if self._growing is None or "generate" not in spec.tasks:
            return loaded
        capacity = self._growing.capacity(spec.key)
        return structs.replace(loaded, slots=capacity.slots, kv_tokens=capacity.kv_tokens)

    def _generating(self) -> Growing:
        if self._growing is None:
            raise ModelUnavailable(f"the {self._runtime.name} runtime does not generate")
        return self._growing

    def _adapting(self) -> Adapting:
        if not self._runtime.traits.lora:
            raise ModelUnavailable(f"the {self._runtime.name} runtime takes no adapters")
        return cast("Adapting", self._runtime)

    def _load_adapter(self, call: LoadAdapter) -> Loaded:
        begun_s = monotonic()
        try:
            size_bytes = self._adapting().load_adapter(call.key, call.adapter)
        except OSError as error:
            raise WeightsMissing(f"{call.adapter.key} cannot be read: {error}") from error
        return Loaded(call.seq, size_bytes, monotonic() - begun_s)

    def _loaded(self, spec: ModelSpec) -> bool:
        """Loads a model; whatever the runtime raises becomes the error of its kind."""
        try:
            with panics_as_errors():
                return self._runtime.load(spec)
        except ShoalError:
            raise
        except MemoryError as error:
            raise OutOfMemory(f"{spec.key} does not fit: {error}") from error
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise OutOfMemory(f"{spec.key} does not fit: {error}") from error
            raise WeightsMissing(f"{spec.key} cannot be read: {error}") from error
        except Exception as error:  # task root
            log.exception("%s does not load", spec.key)
            raise ModelUnavailable(f"{spec.key} does not load: {error}") from error

    def _held_bytes(self) -> int:
        """What models take: the device's own memory, or the host's where it has none."""
        device = device_memory(self._device)
        return device.held_bytes if device.total_bytes else held_bytes(self._process)

    def _run(self, call: Run) -> Ran:
        begun_s = monotonic()
        ran = self._attempt(call.key, call.items, call.block_tokens)
        padded_tokens = ran.padded_tokens
        done: list[ItemDone] = []
        for item, outcome in zip(call.items, ran.outcomes, strict=True):
            if isinstance(outcome, Result):
                done.append(ItemDone(item.item, result=msgspec.Raw(_encode(outcome))))
                continue
            parts = alone(item)
            if len(parts) == 1 or not item.params.partial or outcome.input_index is None:
                done.append(ItemDone(item.item, failure=Failure.of(outcome)))
                continue
            # One of its inputs is at fault, and the others may be as well: each runs by itself.
            tried = self._attempt(call.key, parts, call.block_tokens)
            padded_tokens += tried.padded_tokens
            done.append(_joined(item, tried.outcomes))
        return Ran(call.seq, done, monotonic() - begun_s, padded_tokens)

    def _attempt(self, key: str, items: Sequence[RunItem], block_tokens: int | None) -> RanItems:
        """Runs items; when the whole batch is lost, each half on its own."""
        try:
            with panics_as_errors():
                return self._try_again(key, items, self._runtime.run(key, items, block_tokens))
        except ShoalError as raised:
            error = raised
        except MemoryError as raised:
            error = OutOfMemory(f"the batch does not fit: {raised}")
        except Exception as raised:  # noqa: BLE001 # task root
            log.warning("a batch of %d items failed: %r", len(items), raised)
            error = RunFailed(f"{type(raised).__name__}: {raised}")
        gc.collect()
        if len(items) == 1:
            return RanItems([error], 0)
        middle = len(items) // 2
        first = self._attempt(key, items[:middle], block_tokens)
        second = self._attempt(key, items[middle:], block_tokens)
        return RanItems(
            first.outcomes + second.outcomes, first.padded_tokens + second.padded_tokens
        )

    def _try_again(self, key: str, items: Sequence[RunItem], ran: RanItems) -> RanItems:
        """Runs each item whose numbers were not finite once more, alone.

        A runtime that computes in a lower precision has tried float32 by itself before it says so.
        """
        outcomes, padded_tokens = list(ran.outcomes), ran.padded_tokens
        for at, item in enumerate(items):
            if isinstance(outcomes[at], RunFailed):
                again = self._runtime.run(key, [item])
                outcomes[at] = again.outcomes[0]
                padded_tokens += again.padded_tokens
        return RanItems(outcomes, padded_tokens)


def _joined(item: RunItem, outcomes: Sequence[Result | ShoalError]) -> ItemDone:
    """What becomes of an item whose inputs ran by themselves."""
    good = [outcome for outcome in outcomes if isinstance(outcome, Result)]
    failures = {
        at: structs.replace(Failure.of(outcome), input_index=at)
        for at, outcome in enumerate(outcomes)
        if isinstance(outcome, ShoalError)
    }
    result = msgspec.Raw(_encode(Result.join(good))) if good else EMPTY
    return ItemDone(item.item, result, failures=failures)


def main(argv: Sequence[str]) -> None:
    """Serves the worker at the other end of the inherited socket until it closes."""
    parser = argparse.ArgumentParser(prog="shoal.runtimes.host")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--runtime", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--nice", type=int, default=0)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s runtime: %(message)s")
    end = socket.socket(fileno=options.fd)
    if options.nice:
        stand_back(options.nice)
    try:
        runtime = create(options.runtime, device=options.device, threads=options.threads)
    except ShoalError as error:
        log.error("%s", error)  # noqa: TRY400 - one clear line
        refuse(end, Failed(NO_CALL, Failure.of(error)))
        sys.exit(3)
    gc.freeze()  # what the libraries made stays; collecting at each load need not walk it
    host = Host(runtime, options.device)
    server = RuntimeServer(
        end, lambda call: host.handle(call, server.send), host.ask, stop=host.stop
    )
    server.serve(host.hello())


if __name__ == "__main__":
    main(sys.argv[1:])
