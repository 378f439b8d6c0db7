"""The residency planner on random states and on a mock clock: what it may never do, and must."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.residency import Close, Copy, Demand, Evict, Held, Load, Memory, fits, kept
from shoal.core.residency_plan import ACTIVE_S, COST_LOADS, ResidencyPlanner, stay_s
from shoal.core.residency_rank import RANKINGS, DensityRanking, Known, LruRanking, make_ranking
from shoal.errors import Bug

NOW = 1000.0
KNOWN = Known({f"m{n}": 10 for n in range(8)}, 100, {"m1": 3}, {"m1": [NOW + 5.0]})


def demand(model, size=40, **fields):
    return Demand(model, size, fields.pop("load_s", 2.0), measured=True, **fields)


def copy(model, size=40, **fields):
    given_ = {"since_s": NOW - 100.0, "used_s": NOW - 1.0, **fields}
    return Copy(model, given_.pop("device", "d"), size, **given_)


def held(copies=(), demands=(), *, budget=100, loading=(), idle=("d",), devices=("d",)):
    loads = {d.model: d.size_bytes for d in demands}
    used = sum(c.size_bytes for c in copies) + sum(loads[model] for model, _ in loading)
    memory = Memory("memory", budget, used, devices)
    return Held((memory,), tuple(copies), tuple(demands), tuple(loading), frozenset(idle))


def planner(name="density"):
    return ResidencyPlanner(make_ranking(name, KNOWN))


def beside_idle(queued, *, copies=1, load_s=0.5):
    """A model with copies on the first devices, work of it that waits, and a device that idles."""
    places = [copy("m", device=f"d{n}", busy=True) for n in range(copies)]
    wanted = demand("m", waiting=queued, queued=queued, load_s=load_s)
    names = tuple(f"d{n}" for n in range(copies + 1))
    return held(places, [wanted], devices=names, idle=names[copies:], budget=400)


def test_another_copy_loads_once_it_would_have_worked_for_as_long_as_a_load_takes():
    """Ski rental: not at the first look, and not where work waits now and then only."""
    policy = planner()
    looks = [policy.plan(beside_idle(8), NOW + 0.1 * n) for n in range(7)]
    assert [bool(actions) for actions in looks] == [False] * 5 + [True, False]
    (load,) = looks[5]
    assert (load.model, load.device) == ("m", "d1")
    policy = planner()
    for n in range(200):  # half of the time nothing waits
        assert not policy.plan(beside_idle(8 if n % 2 else 0), NOW + 0.1 * n)


def test_another_copy_is_no_use_without_an_idle_device():
    """While all devices work nothing is missed, however long the line."""
    policy = planner()
    full = beside_idle(100)
    for n in range(100):
        now = replace(full, idle_devices=frozenset())
        assert not policy.plan(now, NOW + 0.1 * n)


def test_planner_looks_again_when_another_copy_will_have_paid():
    """The next look comes when the load is earned."""
    policy = planner()
    policy.plan(beside_idle(8), NOW)
    assert policy.next_look_s(beside_idle(8), NOW) == pytest.approx(NOW + 0.5)


@st.composite
def states(draw):
    """A worker of one or two memories with two devices each, in any state a shell may report."""
    devices = [("a0", "a1"), ("b0", "b1")][: draw(st.integers(1, 2))]
    flat = [device for pair in devices for device in pair]
    moments = st.floats(NOW - 200.0, NOW)
    copies, demands, loading = [], [], []
    for n in range(draw(st.integers(1, 8))):
        model, size = f"m{n}", draw(st.integers(1, 60))
        places = draw(st.lists(st.sampled_from(flat), unique=True, max_size=2))
        for device in places:
            if draw(st.integers(0, 9)) == 0 and device not in [d for _, d in loading]:
                loading.append((model, device))
                continue
            since_s = draw(moments)
            used_s = max(since_s, draw(moments))
            copies.append(Copy(model, device, size, since_s, used_s, draw(st.booleans())))
        waiting = draw(st.integers(0, 3))
        demands.append(
            Demand(
                model,
                size,
                draw(st.floats(0.1, 10.0)),
                measured=bool(places) or draw(st.booleans()),
                waiting=waiting,
                waited_s=waiting * draw(st.floats(0.0, 20.0)),
                backlog_s=waiting * draw(st.floats(0.0, 20.0)),
                slack_s=draw(st.none() | st.floats(-1.0, 5.0)) if waiting else None,
                pinned=draw(st.integers(0, 5)) == 0,
                min_copies=draw(st.sampled_from([0, 0, 0, 1, 2])),
                elsewhere=draw(st.integers(0, 1)),
                idle_timeout_s=draw(st.none() | st.floats(1.0, 100.0)),
                blocked=draw(st.integers(0, 5)) == 0,
            )
        )
    sizes = {d.model: d.size_bytes for d in demands}
    memories = []
    for number, pair in enumerate(devices):
        used = sum(c.size_bytes for c in copies if c.device in pair)
        used += sum(sizes[model] for model, device in loading if device in pair)
        memories.append(Memory(f"memory{number}", draw(st.integers(20, 160)), used, pair))
    idle = frozenset(draw(st.lists(st.sampled_from(flat), unique=True)))
    return Held(tuple(memories), tuple(copies), tuple(demands), tuple(loading), idle)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(states(), st.sampled_from(RANKINGS), st.lists(st.integers(0, 7), max_size=12))
def test_residency_plan_keeps_its_invariants(state, name, requests):
    """Never a busy or pinned one, one load a device, within budget, no victim without need."""
    policy, again = planner(name), planner(name)
    for each in (policy, again):
        for n in requests:
            each.on_requests(f"m{n}", 1, NOW)
    actions = policy.plan(state, NOW)
    assert actions == again.plan(state, NOW)  # the same state and past give the same plan
    copies = {(c.model, c.device): c for c in state.copies}
    demands = {d.model: d for d in state.demands}
    memory_of = {device: m for m in state.memories for device in m.devices}
    room = {m.name: m.budget_bytes - m.used_bytes for m in state.memories}
    loading, evicted, victims = list(state.loading), [], []
    for action in actions:
        place = (action.model, action.device)
        if isinstance(action, Close):
            assert copies[place].busy
            continue
        memory = memory_of[action.device].name
        assert place not in evicted
        if isinstance(action, Evict):
            assert not copies[place].busy
            assert action.model not in kept(state)
            evicted.append(place)
            room[memory] += copies[place].size_bytes
            if "needs the room" in action.why:
                victims.append(copies[place].size_bytes)
        else:
            assert place not in copies
            assert not demands[action.model].blocked
            assert action.device not in [device for _, device in loading]
            loading.append(place)
            room[memory] -= demands[action.model].size_bytes
            if all(demands[m].measured for m, d in loading if memory_of[d].name == memory):
                assert room[memory] >= 0
                assert all(room[memory] < size for size in victims)
            victims = []


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(states(), st.integers(61, 10_000))
def test_residency_estimate_never_costs_an_only_copy_in_use(state, estimate):
    """A claim of unmeasured size evicts no last copy in use, as far as a quarter more may do."""
    active = [c for c in state.copies if c.used_s > NOW - ACTIVE_S and not c.busy]
    demands = [demand(c.model, c.size_bytes, load_s=1.0) for c in active]
    copies = {c.model: c for c in active}  # one of each
    used = sum(c.size_bytes for c in copies.values())
    memory = Memory("memory", max(used, 4 * estimate), used, ("a0", "a1", "b0", "b1", "c"))
    new = Demand("new", estimate, 1.0, waiting=5, waited_s=100.0, slack_s=0.0)
    full = replace(memory, used_bytes=memory.budget_bytes)
    actions = planner().plan(Held((full,), tuple(copies.values()), (*demands, new)), NOW)
    assert [type(action) for action in actions] == [Load]


def test_residency_correction_after_a_wrong_estimate_takes_what_the_measure_needs():
    """Over the budget by measure, the least worth goes, and no more than that."""
    policy = planner()
    for _ in range(3):
        policy.on_requests("hot", 1, NOW)
    policy.on_requests("warm", 1, NOW)
    demands = [demand("hot"), demand("warm", 20), demand("cold", 20), demand("new", 30, waiting=1)]
    copies = [copy("hot"), copy("warm", 20), copy("cold", 20), copy("new", 30, since_s=NOW)]
    assert policy.plan(held(copies, demands), NOW) == [
        Evict("cold", "d", "the memory is over its budget")
    ]


def test_residency_cold_model_loads_at_once_where_there_is_room():
    """With room, a claim waits for nothing and evicts nothing; without, it first must be strong."""
    new = demand("new", waiting=1)
    assert [type(a) for a in planner().plan(held([copy("a")], [demand("a"), new]), NOW)] == [Load]
    policy = planner()
    policy.on_requests("a", 1, NOW)
    policy.on_requests("b", 1, NOW)
    copies, demands = [copy("a"), copy("b")], [demand("a"), demand("b")]
    assert policy.plan(held(copies, [*demands, new]), NOW) == []
    for stronger in (replace(new, waited_s=COST_LOADS * new.load_s), replace(new, slack_s=0.0)):
        kinds = [type(a) for a in policy.plan(held(copies, [*demands, stronger]), NOW)]
        assert kinds == [Evict, Load]
    policy.on_requests("new", 4, NOW)
    kinds = [type(a) for a in policy.plan(held(copies, [*demands, new]), NOW)]
    assert kinds == [Evict, Load]


def test_residency_next_look_is_when_a_claim_matures():
    """The moment that is named is the one at which the plan changes."""
    policy = planner()
    policy.on_requests("a", 5, NOW)
    copies, new = [copy("a", 90)], demand("new", waiting=2, waited_s=1.0)
    state = held(copies, [demand("a", 90), new])
    at_s = policy.next_look_s(state, NOW)
    assert at_s == NOW + (COST_LOADS * new.load_s - 1.0) / 2
    assert policy.plan(state, NOW) == []
    later = held(copies, [demand("a", 90), replace(new, waited_s=COST_LOADS * new.load_s)])
    assert [type(a) for a in policy.plan(later, at_s)] == [Evict, Load]


def test_residency_busy_victim_is_closed_and_its_room_is_kept():
    """A busy copy that must go gets no new batches, and a small newcomer does not take the room."""
    policy = planner()
    busy = copy("a", 60, busy=True)
    a = demand("a", 60, waiting=9)
    big = demand("big", 80, waiting=1, waited_s=50.0)
    small = demand("small", 10, waiting=1)
    state = held([busy], [a, big, small])
    assert policy.plan(state, NOW) == [Close("a", "d", "big needs the room")]
    idle = held([replace(busy, busy=False)], [a, big, small])
    assert [type(x) for x in policy.plan(idle, NOW)] == [Evict, Load]


def test_residency_stay_is_granted_to_a_copy_with_work():
    """A copy that has work of its own stays for a while before a mature claim takes its room."""
    policy = planner()
    policy.on_requests("a", 5, NOW)
    a = demand("a", 60, waiting=9)
    big = demand("big", 80, waiting=1, waited_s=50.0)
    since_s = NOW - stay_s(a.load_s)
    for early_s, kinds in ((0.0, [Evict, Load]), (0.1, [])):
        state = held([copy("a", 60, since_s=since_s + early_s)], [a, big])
        assert [type(x) for x in policy.plan(state, NOW)] == kinds


def test_residency_pinned_and_least_copies_load_without_demand():
    """What is to be there is loaded though nobody asks, until the pool has enough."""
    for fields, loads in (
        ({"pinned": True}, 1),
        ({"min_copies": 2, "elsewhere": 1}, 1),
        ({"min_copies": 2, "elsewhere": 2}, 0),
        ({"pinned": True, "blocked": True}, 0),
    ):
        assert len(planner().plan(held([], [demand("m", **fields)]), NOW)) == loads


def test_residency_never_goes_below_the_least_copies_in_one_plan():
    """Two copies that nobody asks for, and room that is short of both: one of them stays."""
    idle = demand("m", 60, min_copies=1, idle_timeout_s=1.0)
    copies = [copy("m", 60), copy("m", 60, device="e")]
    timed_out = held(copies, [idle], devices=("d", "e"))
    assert len(planner().plan(timed_out, NOW)) == 1
    tight = held(copies, [replace(idle, idle_timeout_s=None)], devices=("d", "e"), budget=10)
    assert len(planner().plan(tight, NOW)) == 1


def test_residency_replica_is_loaded_when_the_backlog_pays_for_it():
    """A long backlog puts a second copy on an idle device; a short one does not."""
    for backlog_s, actions in ((100.0, 1), (3.0, 0)):
        hot = demand("hot", waiting=50, backlog_s=backlog_s)
        state = held([copy("hot", busy=True)], [hot], devices=("d", "e"), idle=("e",))
        plan = planner().plan(state, NOW)
        assert [a.device for a in plan] == ["e"] * actions


def test_residency_idle_timeout_evicts_without_need():
    """A model with an idle timeout goes when it is over, at the moment that was named before."""
    state = held([copy("m")], [demand("m", idle_timeout_s=10.0)])
    policy = planner()
    at_s = policy.next_look_s(state, NOW)
    assert policy.plan(state, NOW) == []
    assert [type(a) for a in policy.plan(state, at_s)] == [Evict]


def test_residency_model_larger_than_the_memory_is_never_planned():
    """What cannot fit beside what is pinned does not fit, is in no plan and harms nobody."""
    copies = [copy("pinned", 50), copy("b", 40)]
    demands = [demand("pinned", 50, pinned=True), demand("b")]
    for size, room in ((50, True), (51, False)):
        state = held(copies, [*demands, demand("m", size, waiting=1, waited_s=99.0)])
        assert fits(state, "m") is room
        assert bool(planner().plan(state, NOW)) is room


def test_residency_ranking_forgets_models_that_are_gone():
    """A ranking remembers models of the catalog only."""
    ranking = DensityRanking()
    policy = ResidencyPlanner(ranking)
    for n in range(100):
        policy.on_requests(f"old{n}", 1, NOW)
    policy.on_requests("m", 1, NOW)
    policy.plan(held([], [demand("m")]), NOW)
    assert set(ranking._known) == {"m"}


def test_residency_ranking_by_name_knows_what_it_needs():
    """Every name makes a ranking; those that need to know beforehand say so."""
    assert isinstance(make_ranking("lru"), LruRanking)
    for name in ("pin", "clairvoyant"):
        with pytest.raises(Bug):
            make_ranking(name)
