"""The gateway's count of what waits, and what it refuses for it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.catalog.schema import Entry, Profile
from shoal.catalog.snapshot import Snapshot
from shoal.core.lanes import DEFAULT_LANES, parse_lanes
from shoal.errors import Overloaded
from shoal.gateway.backlog import SILENT_S, BacklogBook
from shoal.gateway.fleet import Fleet
from shoal.wire.envelope import Backlog, ModelState, Status, encode

LANES = parse_lanes(DEFAULT_LANES)


def entry(name, tokens_per_s=1000.0, weight=1.0):
    profile = Profile(tokens_per_s=tokens_per_s)
    return Entry(id=name, tasks=["encode"], source="file:///x", profile=profile, weight=weight)


A, B = entry("a"), entry("b")
HEAVY = entry("heavy", weight=9.0)
WRITER = Entry(id="writer", tasks=["generate"], source="file:///x")
CATALOG = Snapshot([A, B, HEAVY, WRITER])


class Desk:
    """A book with a fleet and a clock of its own; `hear` is a worker's heartbeat."""

    def __init__(self, devices=0, **options):
        self.now = 100.0
        self.fleet = Fleet(lambda: self.now)
        self.book = BacklogBook(
            self.fleet, lambda: CATALOG, LANES, name="this", clock=lambda: self.now, **options
        )
        if devices:
            self.hear(devices)

    def hear(self, devices, worker="w", **token_s):
        states = [
            ModelState(e.key, "resident", token_s=token_s.get(e.id, 0.0)) for e in CATALOG.entries
        ]
        self.fleet.on_status(encode(Status(worker, states, devices=devices)))

    def refusal(self, model=A, lane="interactive", tokens=100, time_s=1.0):
        """None, or the seconds after which the job should come again."""
        try:
            self.book.admit(model, lane, [tokens], time_s)
        except Overloaded as error:
            return error.retry_after_s
        return None

    def other(self, tokens, name="that", items=()):
        self.book.on_backlog(encode(Backlog(name, tokens, dict(items))))

    def slots(self, n, token_s=0.01):
        """A device with so many slots of the generator, at that price of a token."""
        state = ModelState(WRITER.key, "resident", token_s=token_s, at_once=n)
        self.fleet.on_status(encode(Status("w", [state])))


def test_backlog_refuses_what_cannot_be_in_time():
    """10,000 tokens at 1,000 a second and device are 5 s on two devices: too long for 3 s."""
    desk = Desk(devices=2)
    desk.book.add("interactive", "a@1", 10_000, 1)
    assert desk.refusal(time_s=6.0) is None
    with pytest.raises(
        Overloaded, match=r"10\.0 s of device time before it \(devices: 2\)"
    ) as told:
        desk.book.admit(A, "interactive", [100], 3.0)
    assert (told.value.code, told.value.http_status) == ("overloaded", 429)
    assert told.value.retry_after_s == pytest.approx(5.0 + 0.05 + 0.2 - 3.0)


def test_backlog_admits_the_same_job_after_the_time_it_named():
    """Once that many seconds are worked off on all devices, the job is let in."""
    desk = Desk(devices=2)
    desk.book.add("interactive", "a@1", 10_000, 1)
    after_s = desk.refusal(time_s=3.0)
    desk.book.add("interactive", "a@1", -int(after_s * 2 * 1000) - 1, -1)
    assert desk.refusal(time_s=3.0) is None


def test_backlog_knows_nothing_without_workers():
    """Before the first heartbeat, and after the last has grown old, everything is admitted."""
    desk = Desk()
    desk.book.add("interactive", "a@1", 10**9, 1)
    assert desk.refusal() is None
    desk.hear(devices=1)
    assert desk.refusal() is not None
    desk.now += 5.1
    assert desk.refusal() is None


def test_backlog_lets_everything_in_when_told_to():
    """`admission` false never refuses."""
    desk = Desk(devices=1, admission=False)
    desk.book.add("interactive", "a@1", 10**9, 1)
    assert desk.refusal() is None


def test_backlog_prefers_what_workers_measured_to_the_profile():
    """The profile's guess counts until a worker has seen the model run."""
    desk = Desk(devices=1)
    desk.book.add("interactive", "a@1", 10_000, 1)
    assert desk.book.backlog_s("interactive") == pytest.approx(10.0)
    desk.now += 1.0
    desk.hear(devices=1, a=1e-5)
    assert desk.book.backlog_s("interactive") == pytest.approx(0.1)
    assert desk.refusal() is None


def test_backlog_learns_speeds_while_nothing_waits():
    """Items are cut by what workers say of a model, on an idle fleet too."""
    desk = Desk(devices=1)
    assert desk.book.item_tokens("a@1") == 64
    desk.now += 1.0
    desk.hear(devices=1, a=1e-4)
    assert desk.book.item_tokens("a@1") == 250


def test_backlog_counts_cost_not_requests():
    """A job of 2,000 inputs is refused where one of 20 is admitted."""
    desk = Desk(devices=1)
    desk.book.add("interactive", "a@1", 1_000, 1)
    assert desk.refusal(tokens=20 * 10, time_s=5.0) is None
    assert desk.refusal(tokens=2000 * 10, time_s=5.0) is not None


def test_backlog_cuts_long_jobs_to_a_part_of_the_shortest_quantum():
    """Items fit 25 ms at the speed that workers report, or else the profile's; 64 at least."""
    desk = Desk()
    assert desk.book.item_tokens("a@1") == 64  # 1,000 tokens/s by the profile
    fast = Desk()
    fast.hear(1, a=1e-4)
    assert fast.book.item_tokens("a@1") == 250
    slow = Desk()
    slow.hear(1, a=0.1)
    assert slow.book.item_tokens("a@1") == 64


def test_backlog_of_bulk_does_not_shut_interactive_out():
    """A long bulk queue leaves interactive jobs their share, and only bulk is refused."""
    desk = Desk(devices=1)
    desk.book.add("bulk", "a@1", 100_000, 1)
    assert desk.refusal(lane="interactive", time_s=2.0) is None
    assert desk.refusal(lane="bulk", time_s=2.0) is not None
    desk.book.add("interactive", "a@1", 5_000, 1)
    assert desk.refusal(lane="interactive", time_s=2.0) is not None


def test_backlog_of_one_model_does_not_shut_the_others_out():
    """A model waits for its fair share, by weight, and not for all of another's backlog."""
    desk = Desk(devices=1)
    desk.book.add("interactive", "a@1", 100_000, 1)
    assert desk.refusal(model=A, time_s=2.0) is not None
    assert desk.refusal(model=B, time_s=2.0) is None
    desk.book.add("interactive", "b@1", 1_000, 1)
    desk.book.add("interactive", "heavy@1", 1_000, 1)
    assert desk.refusal(model=B, time_s=3.0) is not None
    assert desk.refusal(model=HEAVY, time_s=3.0) is None


def test_backlog_of_other_gateways_counts_until_they_fall_silent():
    """The last word of each gateway counts, our own echo does not, and 5 s of silence end it."""
    desk = Desk(devices=1)
    desk.other({"interactive": {"a@1": 9_000}})
    desk.other({"interactive": {"a@1": 5_000, "b@1": 1_000}})
    desk.other({"bulk": {"a@1": 4_000}, "unheard_of": {"a@1": 10**9}}, name="third")
    desk.other({"interactive": {"a@1": 10**9}}, name="this")
    assert desk.book.backlog_s("interactive") == pytest.approx(6.0)
    assert desk.book.backlog_s("bulk") == pytest.approx(4.0)
    assert desk.refusal(time_s=2.0) is not None
    desk.now += SILENT_S - 1
    desk.hear(devices=1)
    desk.other({"interactive": {"b@1": 1}})
    desk.now += 1.1
    assert desk.book.backlog_s("bulk") == 0.0
    assert desk.book.backlog_s("interactive") == pytest.approx(0.001)
    assert desk.refusal(time_s=2.0) is None


def test_backlog_ignores_what_it_cannot_read():
    """A broken message, or one of a newer major version, changes nothing."""
    desk = Desk(devices=1)
    desk.book.on_backlog(b"\xff")
    desk.book.on_backlog(encode(Backlog("that", {"bulk": {"a@1": 1}}, v=2)))
    assert desk.book.backlog_s("bulk") == 0.0


def test_backlog_says_when_a_full_line_has_room():
    """A tenth of what waits in the line, or the job itself if more; at least a second."""
    desk = Desk(devices=2)
    assert desk.book.retry_s("a@1", "bulk", 10) == 1.0
    desk.book.add("bulk", "a@1", 100_000, 1)
    assert desk.book.retry_s("a@1", "bulk", 10) == pytest.approx(5.0)
    assert desk.book.retry_s("a@1", "bulk", 40_000) == pytest.approx(20.0)


def test_backlog_bounds_the_wait_by_lane():
    """The gauge of a lane is the bound of a new model in it: its share of what waits, and turns."""
    desk = Desk(devices=1)
    assert desk.book.wait_bound_s("interactive") == pytest.approx(0.2)
    desk.book.add("bulk", "a@1", 10_000, 1)
    desk.book.add("interactive", "a@1", 800, 1)
    assert desk.book.wait_bound_s("interactive") == pytest.approx(0.8 / 0.8 + 3 * 0.1)
    assert desk.book.wait_bound_s("bulk") == pytest.approx(10.8 + 3 * 0.4)


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["interactive", "bulk"]), st.sampled_from("ab"), st.integers(1, 5000)
    ),
    max_size=30,
)


@settings(max_examples=40)
@given(MOVES, MOVES, st.randoms(use_true_random=False))
def test_backlog_counts_exactly(own, others, rng):
    """What was added and not yet taken away is told, to the token; others' count is beside it."""
    desk = Desk(devices=1)
    for n, (lane, model, tokens) in enumerate(others):
        desk.other({lane: {model: tokens}}, name=f"gateway {n % 3}")
    before = {rule.name: desk.book.backlog_s(rule.name) for rule in LANES}
    left = list(own)
    for move in own:
        desk.book.add(*move, 1)
    rng.shuffle(left)
    while left:
        lane, model, tokens = left.pop()
        desk.book.add(lane, model, -tokens, -1)
        told = {
            (lane, model): n
            for lane, models in desk.book.message().tokens.items()
            for model, n in models.items()
        }
        waiting = {}
        for lane, model, tokens in left:
            waiting[(lane, model)] = waiting.get((lane, model), 0) + tokens
        assert told == waiting
        assert sum(desk.book.message().items.values()) == len(left)
    assert {rule.name: desk.book.backlog_s(rule.name) for rule in LANES} == before


def test_backlog_refuses_no_text_while_a_slot_is_free():
    """However long the others are, a text begins at once: until all slots are taken, anywhere."""
    desk = Desk()
    desk.slots(4)
    desk.book.add("interactive", WRITER.key, 30_000, 3)
    assert desk.refusal(WRITER, tokens=10, time_s=1.0) is None
    desk.other({"interactive": {WRITER.key: 10}}, items={WRITER.key: 1})
    assert desk.refusal(WRITER, tokens=10, time_s=1.0) is not None
    desk.other({})
    assert desk.refusal(WRITER, tokens=10, time_s=1.0) is None
    desk.book.add("interactive", WRITER.key, 10, 1)
    assert desk.refusal(WRITER, tokens=10, time_s=1.0) is not None
    desk.book.add("interactive", WRITER.key, -10, -1)
    assert desk.refusal(WRITER, tokens=10, time_s=1.0) is None


def test_backlog_counts_every_choice_as_a_text():
    """Two choices want two slots, and take no longer than one where both are free."""
    desk = Desk()
    desk.slots(2)
    desk.book.add("bulk", A.key, 1, 1)
    desk.book.admit(WRITER, "interactive", [1_000, 1_000], 1.0)
    with pytest.raises(Overloaded):
        desk.book.admit(WRITER, "interactive", [1_000, 1_000, 1_000], 1.0)


def test_backlog_expects_a_text_to_take_the_time_of_its_slot():
    """Behind texts in all four slots, 1,000 tokens take 4 s: a slot is a quarter of its device."""
    desk = Desk()
    desk.slots(4, token_s=0.001)
    desk.book.add("interactive", WRITER.key, 4_000, 4)
    assert desk.refusal(WRITER, tokens=1_000, time_s=8.5) is None
    assert desk.refusal(WRITER, tokens=1_000, time_s=7.9) is not None
    assert desk.refusal(WRITER, tokens=10, time_s=7.9) is None
