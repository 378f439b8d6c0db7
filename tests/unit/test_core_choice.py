"""Which of several runtimes serves a model: the order, the margin, and what makes it change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.catalog.schema import Alternative, Entry, Profile
from shoal.catalog.variants import declared_token_s, on_runtime, runtimes_of
from shoal.core.choice import MARGIN, Candidate, choose

ENTRY = Entry(
    id="m",
    tasks=["encode"],
    source="file:///graph",
    digests={"model.onnx": "0" * 64},
    weights="model.onnx",
    options={"threads": 1},
    memory_mib=100,
    alternatives=[
        Alternative("torch", memory_mib=400),
        Alternative("candle", source="file:///folder", profile=Profile(tokens_per_s=2_500.0)),
    ],
)


def test_choice_takes_the_first_that_can_serve():
    """Without costs the entry's order counts; what cannot serve says why."""
    choice = choose([Candidate("onnx", "not installed"), Candidate("torch"), Candidate("candle")])
    assert (choice.runtime, choice.why_not) == ("torch", None)
    assert choice.others["onnx"] == "not installed"
    assert "after torch" in choice.others["candle"]


@pytest.mark.parametrize(("times", "chosen"), [(MARGIN * 0.99, "onnx"), (MARGIN * 1.01, "torch")])
def test_choice_prefers_what_is_cheaper_by_the_margin_only(times, chosen):
    """A later one goes ahead if it saves more than costs vary anyway; else it says its cost."""
    choice = choose([Candidate("onnx", None, 1e-4 * times), Candidate("torch", None, 1e-4)])
    assert choice.runtime == chosen
    assert " times what " in next(iter(choice.others.values()))


def test_choice_compares_only_what_is_known():
    """An unknown cost is no small one."""
    assert choose([Candidate("onnx", None, 1.0), Candidate("torch")]).runtime == "onnx"
    assert choose([Candidate("onnx"), Candidate("torch", None, 1e-9)]).runtime == "onnx"


def test_choice_stays_with_what_serves():
    """What serves now counts as the first, unless it cannot any more."""
    two = [Candidate("onnx", None, 1.0), Candidate("torch", None, 1.1)]
    assert choose(two, "torch").runtime == "torch"
    assert choose([two[0], Candidate("torch", "broken")], "torch").runtime == "onnx"


def test_choice_prefers_what_can_do_all_that_is_wanted():
    """A lack counts where another runtime has none; where all lack something, the model is served.

    It outweighs the cost and what serves now, and says so.
    """
    poor = Candidate("onnx", None, 1e-9, lacks="no adapters")
    rich = Candidate("torch", None, 1.0)
    choice = choose([poor, rich], "onnx")
    assert (choice.runtime, choice.others) == ("torch", {"onnx": "no adapters"})
    broken = Candidate("torch", "broken")
    choice = choose([poor, broken])
    assert (choice.runtime, choice.why_not, choice.others) == ("onnx", None, {"torch": "broken"})


def test_choice_of_none_is_the_first_with_its_reason():
    """Where nothing can serve, the entry's own runtime says why."""
    choice = choose([Candidate("onnx", "a"), Candidate("torch", "b")])
    assert (choice.runtime, choice.why_not, choice.others) == ("onnx", "a", {"torch": "b"})


COSTS = st.lists(st.sampled_from([0.0, 0.9, 1.0, 1.2, 1.3, 2.0]), min_size=3, max_size=3)


@given(st.lists(st.booleans(), min_size=3, max_size=3), COSTS, COSTS)
def test_choice_asked_again_moves_for_a_margin_only(able, before, after):
    """With the same facts what serves stays; with others it gives way to what saves the margin.

    So a model goes back only once costs have changed by the margin twice: never to and fro.
    """
    names = ("onnx", "torch", "candle")

    def asked(costs):
        facts = zip(names, able, costs, strict=True)
        return [Candidate(name, None if ok else "no", s) for name, ok, s in facts]

    served = choose(asked(before))
    if served.why_not is not None:
        assert not any(able)
        return
    assert choose(asked(before), served.runtime).runtime == served.runtime
    moved = choose(asked(after), served.runtime).runtime
    if moved != served.runtime:
        cost = dict(zip(names, after, strict=True))
        assert 0.0 < cost[moved] * MARGIN < cost[served.runtime]


def test_variant_takes_what_the_alternative_says_and_the_rest_of_the_entry():
    """Another source has no digests or file names of the first; the key is the same."""
    torch, candle = on_runtime(ENTRY, "torch"), on_runtime(ENTRY, "candle")
    assert runtimes_of(ENTRY) == ["onnx", "torch", "candle"]
    assert {one.key for one in (ENTRY, torch, candle)} == {"m@1"}
    assert (torch.memory_mib, torch.source, torch.weights) == (400, ENTRY.source, "model.onnx")
    assert (candle.memory_mib, candle.weights, candle.digests) == (100, None, {})
    assert not torch.alternatives
    assert on_runtime(ENTRY, "onnx").options == ENTRY.options


def test_variant_declares_only_costs_that_were_written_for_it():
    """The default profile, and the one of another runtime, say nothing."""
    assert declared_token_s(ENTRY, "onnx") == 0.0
    assert declared_token_s(ENTRY, "torch") == 0.0
    assert declared_token_s(ENTRY, "candle") == pytest.approx(1 / 2_500)
