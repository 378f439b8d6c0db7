"""What native libraries raise where they give up."""

from __future__ import annotations

import asyncio

import pytest

from shoal.errors import Bug, Panic, panics_as_errors
from shoal.worker.threads import Threads


class Panicked(BaseException):
    """As the bindings of native libraries raise it: no `Exception`."""


def panics():
    raise Panicked("index out of bounds")


def test_panic_becomes_an_exception_that_names_it():
    """A handler of exceptions has it, with the words of the library."""
    with pytest.raises(Panic, match="Panicked: index out of bounds"), panics_as_errors():
        panics()


@pytest.mark.parametrize(
    "raised",
    [KeyboardInterrupt(), SystemExit(2), asyncio.CancelledError(), GeneratorExit(), Bug("x")],
    ids=lambda error: type(error).__name__,
)
def test_order_to_end_passes_unchanged(raised):
    """Nobody takes an order to end for a fault of a library; a typed error stays what it is."""
    with pytest.raises(type(raised)) as caught, panics_as_errors():
        raise raised
    assert caught.value is raised


def test_panic_in_a_thread_reaches_the_caller_as_an_exception():
    """The thread is free again, and whoever waits is told."""

    async def main():
        threads = Threads(1, "test")
        for _ in range(2):
            with pytest.raises(Panic):
                await threads.run(panics)
        assert threads.busy == 0

    asyncio.run(main())
