"""Threads that nobody waits for at the end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from shoal.worker.threads import Threads
from tests.conftest import run
from tests.support.pace import limit_s


def test_threads_are_bounded_and_hand_over_what_comes_of_the_work():
    """No more run than may, also where their callers have left; results and errors are the work's.

    The next begins when one has ended.
    """

    async def main():
        threads, gate = Threads(2, "t"), threading.Event()
        first, second = (asyncio.create_task(threads.run(gate.wait)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        third = asyncio.create_task(threads.run(lambda: int("x")))
        await asyncio.wait([first])
        assert threads.busy == 2
        assert not third.done()
        gate.set()
        assert await second
        with pytest.raises(ValueError, match="x"):
            await third

    run(main())


def test_threads_let_a_process_end_while_they_are_at_work():
    """What is silent for ever keeps no process from its end."""
    code = (
        "import asyncio, threading\n"
        "from shoal.worker.threads import Threads\n"
        "async def main():\n"
        "    task = asyncio.create_task(Threads(1, 't').run(threading.Event().wait))\n"
        "    await asyncio.sleep(0.01)\n"
        "    task.cancel()\n"
        "asyncio.run(main())\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], timeout=limit_s(20), check=False).returncode
        == 0
    )
