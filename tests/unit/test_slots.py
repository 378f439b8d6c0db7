"""Slots of generators: what may begin, where, and whose turn it is."""

from __future__ import annotations

from collections import Counter
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.lanes import parse_lanes
from shoal.core.slots import Slots, Text

LANES = parse_lanes("interactive:8:100ms:1s,bulk:2:400ms:5s")


def _text(
    item: str, lane: str = "interactive", *, prompt: int = 10, most: int = 10, at: float = 0.0
) -> Text:
    return Text(item, lane, prompt, most, at)


def test_slots_choose_the_busiest_copy_that_has_room() -> None:
    """Texts fill one copy before they begin on another."""
    slots = Slots(LANES)
    slots.open("a", 2)
    slots.open("b", 2)
    places = []
    for n in range(4):
        chosen = slots.choose([_text(str(n))], 0.0)
        assert chosen is not None
        slots.take(*chosen)
        places.append(chosen[1])
    assert places == [places[0]] * 2 + [places[2]] * 2
    assert places[0] != places[2]
    assert slots.choose([_text("5")], 0.0) is None


def test_slots_count_the_memory_of_prompts_and_what_is_expected() -> None:
    """A slot alone is no room: the tokens of all texts must fit the copy's memory."""
    slots = Slots(LANES)
    slots.open("a", 8, kv_tokens=100)
    slots.take(_text("1", prompt=60, most=20), "a")
    assert slots.choose([_text("2", prompt=20, most=20)], 0.0) is None
    chosen = slots.choose([_text("3", prompt=10, most=10)], 0.0)
    assert chosen is not None
    slots.give("1", tokens=20)
    assert slots.choose([_text("2", prompt=20, most=20)], 0.0) is not None


def test_slots_give_an_empty_copy_any_text() -> None:
    """What is larger than the memory is not held for ever: the engine says what is wrong."""
    slots = Slots(LANES)
    slots.open("a", 2, kv_tokens=10)
    assert slots.choose([_text("1", prompt=1000)], 0.0) is not None


def test_slots_keep_one_for_the_lane_in_a_hurry() -> None:
    """However much bulk waits, an interactive text finds a free slot."""
    slots = Slots(LANES)
    slots.open("a", 3)
    bulk = [_text(f"b{n}", "bulk") for n in range(9)]
    while chosen := slots.choose(bulk, 0.0):
        slots.take(*chosen)
        bulk.remove(chosen[0])
    assert slots.texts("a") == 2
    assert slots.room("bulk") == 0
    assert slots.room("interactive") == 1
    assert slots.choose([*bulk, _text("i", "interactive")], 0.0) == (_text("i", "interactive"), "a")


def test_slots_share_by_weight_when_both_lanes_wait() -> None:
    """Of many texts, each lane begins as many as its weight says."""
    slots = Slots(LANES)
    slots.open("a", 4)
    begun: Counter[str] = Counter()
    numbers = count()
    for _ in range(100):
        waiting = [_text(f"{lane}{next(numbers)}", lane) for lane in ("interactive", "bulk")]
        chosen = slots.choose(waiting, 0.0)
        assert chosen is not None
        slots.take(*chosen)
        begun[chosen[0].lane] += 1
        slots.give(chosen[0].item, tokens=5)
    assert begun == {"interactive": 80, "bulk": 20}


def test_slots_let_no_lane_save_up() -> None:
    """A lane that wanted nothing for a long time gets its share from now on, and no more."""
    slots = Slots(LANES)
    slots.open("a", 4)
    numbers = count()

    def begin(*lanes: str) -> str:
        chosen = slots.choose([_text(f"{lane}{next(numbers)}", lane) for lane in lanes], 0.0)
        assert chosen is not None
        slots.take(*chosen)
        slots.give(chosen[0].item, tokens=5)
        return chosen[0].lane

    for _ in range(1000):
        begin("interactive")
    later = Counter(begin("interactive", "bulk") for _ in range(100))
    assert later["bulk"] <= 21


def test_slots_use_fewer_when_a_token_takes_too_long() -> None:
    """Above the limit of a token's time a copy takes fewer texts at once, and more again below."""
    slots = Slots(LANES, max_token_s=0.1)
    slots.open("a", 4)
    for n in range(4):
        slots.take(_text(str(n)), "a")
    slots.give("0", tokens=5, token_s=0.2)
    assert slots.room("interactive") == 0
    for n in (1, 2, 3):
        slots.give(str(n), tokens=5, token_s=0.09)
    assert slots.room("interactive") == 3
    for n in range(3):
        slots.take(_text(str(n)), "a")
    slots.give("0", tokens=5, token_s=0.01)
    assert slots.room("interactive") == 2


def test_slots_say_how_many_texts_a_copy_has_at_once() -> None:
    """Its slots; fewer where a usual text's share of its memory is larger, or a token too slow."""
    slots = Slots(LANES, max_token_s=0.1)
    slots.open("a", 4)
    slots.take(_text("0"), "a")
    assert slots.at_once("a") == 4
    slots.give("0", tokens=5, token_s=0.2)
    assert slots.at_once("a") < 4
    assert slots.at_once("gone") == 0
    small = Slots(LANES)
    small.open("b", 4, kv_tokens=1_000)
    small.take(_text("1", prompt=400), "b")
    assert small.at_once("b") == 2


def test_slots_forget_the_texts_of_a_copy_that_is_gone() -> None:
    """A lost copy's texts hold nothing, and a new copy of its name begins empty."""
    slots = Slots(LANES)
    slots.open("a", 2)
    slots.take(_text("1"), "a")
    slots.close("a")
    assert slots.active == 0
    assert slots.choose([_text("2")], 0.0) is None
    slots.open("a", 2)
    slots.give("1", tokens=3)
    assert slots.texts("a") == 0


def test_slots_keep_a_copy_for_a_long_prompt_that_has_waited() -> None:
    """Smaller texts of another lane pass a long prompt for its lane's age, and no longer."""
    slots = Slots(LANES)
    slots.open("a", 8, kv_tokens=4096)
    for n in range(3):
        slots.take(_text(f"b{n}", "bulk", prompt=400), "a")
    waiting = [_text("long", prompt=3500, at=0.0), _text("b3", "bulk", prompt=10, at=0.5)]
    assert slots.choose(waiting, 0.9) == (waiting[1], "a")
    assert slots.choose(waiting, 1.1) is None
    for n in range(3):
        slots.give(f"b{n}", tokens=5)
    assert slots.choose(waiting, 1.2) == (waiting[0], "a")


def test_slots_count_room_by_memory_and_by_copies_that_are_open() -> None:
    """What could not begin here for want of memory is left to others, slots or no slots."""
    slots = Slots(LANES)
    slots.open("a", 48, kv_tokens=4096)
    for n in range(5):
        slots.take(_text(str(n), prompt=700, most=10), "a")
    assert slots.room("interactive") == 0
    slots.open("b", 4)
    assert slots.room("interactive") == 4
    assert slots.room("interactive", {"a": True, "b": False}) == 0


@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from(["interactive", "bulk"]), st.integers(1, 400)),
        max_size=60,
    )
)
def test_slots_never_hold_more_than_there_are(steps: list[tuple[bool, str, int]]) -> None:
    """Whatever comes and ends, no copy has more texts than slots, nor more tokens than memory."""
    slots = Slots(LANES)
    slots.open("a", 3, kv_tokens=500)
    slots.open("b", 1, kv_tokens=500)
    held: dict[str, tuple[str, int]] = {}
    for n, (begins, lane, prompt) in enumerate(steps):
        if begins:
            chosen = slots.choose([_text(str(n), lane, prompt=prompt)], 0.0)
            if chosen is not None:
                slots.take(*chosen)
                held[chosen[0].item] = (chosen[1], slots.expected_tokens(chosen[0]))
        elif held:
            item = next(iter(held))
            del held[item]
            slots.give(item, tokens=5)
        for copy, most in (("a", 3), ("b", 1)):
            sizes = [size for place, size in held.values() if place == copy]
            assert slots.texts(copy) == len(sizes) <= most
            assert len(sizes) <= 1 or sum(sizes) <= 500
