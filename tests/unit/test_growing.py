"""Texts of a runtime process: each call ends once, and a stop is never lost."""

from __future__ import annotations

import threading

from shoal.ipc.messages import Answer, Finished, Grown, RunItem, Start
from shoal.runtimes.growing import Growing
from shoal.runtimes.interface import Capacity, Emit
from shoal.wire.generation import Generated, Piece


class Engine:
    """A generator that knows a text only once `start` has returned, as real ones may."""

    def __init__(self) -> None:
        self.texts: dict[str, Emit] = {}
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def capacity(self, key: str) -> Capacity:
        return Capacity(1)

    def start(self, key: str, item: RunItem, emit: Emit) -> None:
        self.begun.set()
        self.go_on.wait(5)
        self.texts[item.item] = emit

    def stop(self, item: str) -> None:
        emit = self.texts.pop(item, None)
        if emit is not None:
            emit(Generated("", "cancelled", 0, 0))


def call(seq: int) -> Start:
    return Start(seq, "m@1", RunItem(f"i{seq}", "generate", [1], texts=["x"]))


def test_growing_stops_a_call_that_has_not_begun() -> None:
    """A stop that overtakes its start is kept: the text never reaches the engine."""
    engine = Engine()
    sent: list[Answer] = []
    growing = Growing(engine)
    growing.stop(7)
    growing.start(call(7), sent.append)
    assert engine.texts == {}
    assert [type(answer) for answer in sent] == [Finished]
    assert isinstance(sent[0], Finished)
    assert sent[0].generated.finish_reason == "cancelled"


def test_growing_stops_a_call_that_is_just_beginning() -> None:
    """A stop that comes before the engine knows the text is carried out when it does."""
    engine = Engine()
    sent: list[Answer] = []
    engine.go_on.clear()
    growing = Growing(engine)
    thread = threading.Thread(target=growing.start, args=(call(1), sent.append))
    thread.start()
    assert engine.begun.wait(5)
    growing.stop(1)
    engine.go_on.set()
    thread.join(5)
    assert engine.texts == {}
    assert [type(answer) for answer in sent] == [Finished]


def test_growing_ends_each_call_once_and_forgets_it() -> None:
    """What an engine says after the end, or a stop of what has ended, changes nothing."""
    engine = Engine()
    sent: list[Answer] = []
    growing = Growing(engine)
    growing.start(call(1), sent.append)
    emit = engine.texts["i1"]
    emit(Piece("a"))
    emit(Generated("a", "stop", 1, 1))
    emit(Generated("b", "stop", 1, 1))
    growing.stop(1)
    growing.start(call(2), sent.append)
    assert [type(answer) for answer in sent] == [Grown, Finished]
    assert "i2" in engine.texts
