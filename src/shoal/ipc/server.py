"""A runtime process's end of the socket.

Owns reading calls, queueing them for the one thread that runs the model, and leaving when the
worker closes its end. Plain threads, no event loop: the main thread belongs to the model's library
for as long as it computes, and a second one reads, so that questions are answered meanwhile.
Does not own what a call does (`shoal.runtimes.host`).
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable

from shoal.ipc.messages import Answer, AskMemory, Call, Failed, Hello, Stop, decode_call, encode
from shoal.wire.envelope import UnreadableMessage
from shoal.wire.frames import FrameDecoder, FrameTooLarge, frame

log = logging.getLogger(__name__)

MAX_WAITING_CALLS = 1024
_READ_BYTES = 256 * 1024


class RuntimeServer:
    """Serves one worker over `end`.

    handle: runs on the main thread; what it returns is sent, and what it begins may `send` later.
    ask, stop: run on the reading thread, at once.
    """

    def __init__(
        self,
        end: socket.socket,
        handle: Callable[[Call], Answer | None],
        ask: Callable[[AskMemory], Answer],
        stop: Callable[[Stop], None] = lambda _: None,
    ) -> None:
        self._end = end
        self._handle = handle
        self._ask = ask
        self._stop = stop
        self._calls: queue.Queue[Call] = queue.Queue(maxsize=MAX_WAITING_CALLS)
        self._sending = threading.Lock()

    def serve(self, hello: Hello) -> None:
        """Says hello, then answers calls until the process ends."""
        self.send(hello)
        threading.Thread(target=self._read, name="calls", daemon=True).start()
        while True:
            answer = self._handle(self._calls.get())
            if answer is not None:
                self.send(answer)

    def send(self, answer: Answer) -> None:
        """Sends an answer, from any thread."""
        try:
            with self._sending:
                self._end.sendall(frame(encode(answer)))
        except OSError:
            _leave()

    def _read(self) -> None:
        decoder = FrameDecoder()
        buffer = bytearray(_READ_BYTES)
        view = memoryview(buffer)
        try:
            while size := self._end.recv_into(buffer):
                for data in decoder.feed(view[:size]):
                    call = decode_call(data)
                    if isinstance(call, AskMemory):
                        self.send(self._ask(call))
                    elif isinstance(call, Stop):
                        self._stop(call)
                    else:
                        self._calls.put(call)
        except (OSError, FrameTooLarge, UnreadableMessage) as error:
            log.error("cannot read calls: %s", error)  # noqa: TRY400 - the cause is in the text
        _leave()


def refuse(end: socket.socket, failed: Failed) -> None:
    """Says why this process cannot serve."""
    end.sendall(frame(encode(failed)))


def _leave() -> None:
    """Ends the process at once, even in the middle of a batch: nobody waits for its result."""
    os._exit(0)
