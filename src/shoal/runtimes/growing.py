"""The texts that grow in this process, between the calls that began them and the generator.

Owns which call an item belongs to, and that each call ends exactly once. Does not own generating
(the runtime's), or the socket.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from shoal.errors import Bug, ShoalError, panics_as_errors
from shoal.ipc.messages import Answer, Failed, Finished, Grown, Start
from shoal.runtimes.interface import Capacity, Generator
from shoal.wire.envelope import Failure
from shoal.wire.generation import Generated, Piece

log = logging.getLogger(__name__)

Send = Callable[[Answer], None]


class Growing:
    """What a generator has under way. Safe from any thread."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._items: dict[int, str] = {}
        self._stopped: set[int] = set()
        self._last_seq = 0
        self._changing = threading.Lock()

    def capacity(self, key: str) -> Capacity:
        """What a loaded model takes at once."""
        return self._generator.capacity(key)

    def start(self, call: Start, send: Send) -> None:
        """Begins to generate for a call; never raises."""
        seq = call.seq
        with self._changing:
            self._items[seq] = call.item.item
            self._last_seq = seq
            stopped = seq in self._stopped

        def emit(what: Piece | Generated | ShoalError) -> None:
            if isinstance(what, Piece):
                send(Grown(seq, what))
            elif self._is_first_end(seq):
                if isinstance(what, Generated):
                    send(Finished(seq, what))
                else:
                    send(Failed(seq, Failure.of(what)))

        if stopped:
            emit(Generated("", "cancelled", 0, 0))
            return
        try:
            with panics_as_errors():
                self._generator.start(call.key, call.item, emit)
            if seq in self._stopped:  # meanwhile, when the generator did not know it yet
                self._generator.stop(call.item.item)
        except ShoalError as error:
            emit(error)
        except Exception as error:  # task root
            log.exception("an item does not start")
            emit(Bug(f"{type(error).__name__}: {error}"))

    def _is_first_end(self, seq: int) -> bool:
        with self._changing:
            self._stopped.discard(seq)
            return self._items.pop(seq, None) is not None

    def stop(self, seq: int) -> None:
        """Ends what a call began, or is about to: calls are begun in the order of their numbers."""
        with self._changing:
            item = self._items.get(seq)
            if item is not None or seq > self._last_seq:
                self._stopped.add(seq)
        if item is not None:
            self._generator.stop(item)
