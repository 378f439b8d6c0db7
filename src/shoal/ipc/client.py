"""The worker's end of a runtime process's socket.

Owns matching answers to calls, and failing every open call when the process goes away. Does not
own the process (`shoal.ipc.child`) or what is called when (`shoal.worker`).
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable
from typing import Any, TypeVar, cast

from shoal.errors import Bug, CapacityError, RuntimeCrashed, ShoalError
from shoal.ipc.messages import (
    NO_CALL,
    AdapterSpec,
    Answer,
    AskMemory,
    Call,
    Failed,
    Finished,
    Grown,
    Hello,
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
    decode_answer,
    encode,
)
from shoal.wire.envelope import UnreadableMessage
from shoal.wire.frames import FrameDecoder, FrameTooLarge, frame
from shoal.wire.generation import Generated, Piece

MAX_CALLS = 256
_READ_BYTES = 256 * 1024


class RuntimeConnection(asyncio.BufferedProtocol):
    """Calls to one runtime process; any number of them may be open, up to `MAX_CALLS`.

    `hello` completes with the process's first message; `batches` counts those that were answered.
    Every method raises `RuntimeCrashed` when the process goes away before it has answered.
    """

    def __init__(self) -> None:
        self.hello: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._decoder = FrameDecoder()
        self._buffer = bytearray(_READ_BYTES)
        self._view = memoryview(self._buffer)
        self._open: dict[int, asyncio.Future[Answer]] = {}
        self._growing: dict[int, Callable[[Piece], None]] = {}
        self._seq = itertools.count(1)
        self.batches = 0
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, end: socket.socket) -> RuntimeConnection:
        """A connection over one end of a socket pair."""
        _, connection = await asyncio.get_running_loop().create_connection(cls, sock=end)
        return connection

    @property
    def lost(self) -> bool:
        """Whether the process at the other end is gone."""
        return self._transport is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Where the next bytes are to be read to."""
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        """Handles the answers that have become complete."""
        try:
            for data in self._decoder.feed(self._view[:nbytes]):
                self._on_answer(decode_answer(data))
        except (FrameTooLarge, UnreadableMessage) as error:
            self._lose(RuntimeCrashed(f"the runtime process sent nonsense: {error}"))
            self.close()

    def _on_answer(self, answer: Answer) -> None:
        if isinstance(answer, Hello):
            if not self.hello.done():
                self.hello.set_result(answer)
            return
        if isinstance(answer, Failed) and answer.seq == NO_CALL:
            self._lose(answer.failure.error())
            return
        if isinstance(answer, Grown):
            on_piece = self._growing.get(answer.seq)
            if on_piece is not None:
                on_piece(answer.piece)
            return
        waiting = self._open.pop(answer.seq, None)
        if waiting is None or waiting.done():
            return
        if isinstance(answer, Failed):
            waiting.set_exception(answer.failure.error())
        else:
            waiting.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fails what is open."""
        detail = f": {exc}" if exc else ""
        self._transport = None
        self._lose(RuntimeCrashed(f"the runtime process went away{detail}"))

    def _lose(self, error: ShoalError) -> None:
        waiting: list[asyncio.Future[Any]] = [self.hello, *self._open.values()]
        self._open.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting for it

    def close(self) -> None:
        """Closes the socket; the process ends when it sees that."""
        if self._transport is not None:
            self._transport.close()

    async def _call(self, make: Callable[[int], Call]) -> Answer:
        return await self._ask(next(self._seq), make)

    async def _ask(self, seq: int, make: Callable[[int], Call]) -> Answer:
        if self._transport is None:
            raise RuntimeCrashed("the runtime process is not running")
        if len(self._open) >= MAX_CALLS:
            raise CapacityError("too many calls to one runtime process are open")
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open[seq] = waiting
        try:
            self._transport.write(frame(encode(make(seq))))
            return await waiting
        finally:
            self._open.pop(seq, None)

    async def load(self, spec: ModelSpec) -> Loaded:
        """Loads a model. Raises what the runtime says of it."""
        return _expect(Loaded, await self._call(lambda seq: Load(seq, spec)))

    async def unload(self, key: str, *, keep: bool = False) -> Memory:
        """Unloads a model; with `keep`, what makes its next load quick may stay."""
        return _expect(Memory, await self._call(lambda seq: Unload(seq, key, keep)))

    async def run(self, key: str, items: list[RunItem], block_tokens: int | None = None) -> Ran:
        """Runs a batch."""
        ran = _expect(Ran, await self._call(lambda seq: Run(seq, key, items, block_tokens)))
        self.batches += 1
        return ran

    async def generate(
        self, key: str, item: RunItem, on_piece: Callable[[Piece], None] = lambda _: None
    ) -> Generated:
        """Generates for one item; pieces come first where the item asks for them.

        Cancelling the call stops the item, and its slot is free at once.
        """
        seq = next(self._seq)
        self._growing[seq] = on_piece
        try:
            answer = await self._ask(seq, lambda seq: Start(seq, key, item))
        except asyncio.CancelledError:
            if self._transport is not None:
                self._transport.write(frame(encode(Stop(seq))))
            raise
        finally:
            del self._growing[seq]
        self.batches += 1
        return _expect(Finished, answer).generated

    async def load_adapter(self, key: str, adapter: AdapterSpec) -> Loaded:
        """Loads an adapter of a loaded model. Raises what the runtime says of it."""
        return _expect(Loaded, await self._call(lambda seq: LoadAdapter(seq, key, adapter)))

    async def unload_adapter(self, key: str, adapter: str) -> Memory:
        """Unloads an adapter."""
        return _expect(Memory, await self._call(lambda seq: UnloadAdapter(seq, key, adapter)))

    async def memory(self) -> Memory:
        """What the process holds."""
        return _expect(Memory, await self._call(AskMemory))


A = TypeVar("A", Finished, Loaded, Memory, Ran)


def _expect(kind: type[A], answer: Answer) -> A:
    if not isinstance(answer, kind):
        raise Bug(f"a {kind.__name__} was expected, not a {type(answer).__name__}")
    return answer
