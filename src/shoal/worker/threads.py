"""Threads that nobody waits for at the end.

What waits for a server or a disk that is silent cannot be stopped, and a process that ends waits
for the threads of an executor. Owns a bounded number of threads that it does not wait for. Does not
own what they do; that must be safe to break off anywhere.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from shoal.errors import panics_as_errors

T = TypeVar("T")


class Threads:
    """At most `most` threads at once, called `name`; who finds none free waits. busy: that run."""

    def __init__(self, most: int, name: str) -> None:
        self.busy = 0
        self._name = name
        self._free = asyncio.Semaphore(most)

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises. A caller who is cancelled leaves it to its end."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        told: asyncio.Future[T] = loop.create_future()
        self.busy += 1

        def end(tell: Callable[[], None]) -> None:
            self.busy -= 1
            self._free.release()
            if not told.done():
                tell()

        def call() -> None:
            try:
                with panics_as_errors():
                    made = work()
            except BaseException as error:  # noqa: BLE001 - task root: the caller has it
                raised = error
                tell = lambda: told.set_exception(raised)  # noqa: E731
            else:
                tell = lambda: told.set_result(made)  # noqa: E731
            with suppress(RuntimeError):  # the loop has ended: nobody is there to be told
                loop.call_soon_threadsafe(end, tell)

        threading.Thread(target=call, name=self._name, daemon=True).start()
        return await told
