"""The worker's small rooms: devices, lines, preparing items; and subjects in the queue."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.catalog.load import load
from shoal.catalog.resolve import tokenizer_path
from shoal.catalog.schema import Entry
from shoal.core.cost import Work
from shoal.core.types import Batch, Item
from shoal.errors import InputTooLong, InvalidRequest, ModelUnavailable, SettingsError
from shoal.ipc.child import Backoff
from shoal.ipc.messages import Traits
from shoal.queue.topology import token
from shoal.wire.envelope import Envelope, Inputs, Params
from shoal.worker.breaker import FIRST_REST_S, MOST_REST_S, Breaker
from shoal.worker.device import Device
from shoal.worker.devices import parse, usable_cores
from shoal.worker.lines import FIRST_PULL, MAX_WAITING_BYTES, Line
from shoal.worker.tokenise import Tokeniser, prepare

IDS = Traits(accepts_ids=True, tasks=["encode"])
TEXTS = Traits(accepts_ids=False, tasks=["encode"])


@pytest.fixture(scope="module")
def minilm():
    entry = load(None).resolve("all-minilm-l6-v2")
    return entry, Tokeniser(tokenizer_path(entry), entry.max_tokens)


def run_item(*arguments):
    """What a runtime is sent of an item."""
    return prepare(*arguments).run_item


def envelope(task="encode", **params):
    return Envelope(
        item="r.0",
        request="r",
        index=0,
        of=1,
        task=task,
        model="m",
        revision="1",
        lane="interactive",
        cost_tokens=1,
        n_inputs=1,
        deadline_s=0.0,
        submitted_s=0.0,
        reply="inbox",
        params=Params(**params),
    )


def sequences(run_item):
    ids, at, found = array("H", run_item.ids), 0, []
    for length in run_item.lengths:
        found.append(list(ids[at : at + length]))
        at += length
    return found


@given(st.text(max_size=20), st.text(max_size=20))
def test_topology_tokens_are_injective_and_safe(a, b):
    """Different model ids never share a subject, and no id can reach outside its token."""
    assert (token(a) == token(b)) == (a == b)
    assert not set(token(a)) & set(". *>\t")


@pytest.mark.parametrize(
    ("devices", "threads", "names"),
    [
        ("cpu:3", 1, ["cpu#0", "cpu#1", "cpu#2"]),
        ("cuda:0, cuda:1", 1, ["cuda:0", "cuda:1"]),
        ("cpu:1,cuda:0", 2, ["cpu#0", "cuda:0"]),
        ("cpu", usable_cores() * 4, ["cpu#0"]),
    ],
)
def test_devices_parse_names_each_device(devices, threads, names):
    """The setting becomes a list of devices; at least one."""
    assert parse(devices, threads=threads) == names


@pytest.mark.parametrize("devices", ["gpu", "cpu:0", "", "cuda:0,cuda:0"])
def test_devices_parse_names_what_is_wrong(devices):
    """A wrong device is an error of the settings."""
    with pytest.raises(SettingsError, match="devices"):
        parse(devices, threads=1)


def test_backoff_doubles_and_forgets_after_a_good_run():
    """Restarts slow down, up to a bound, and start anew after a healthy run."""
    backoff = Backoff(first_s=0.1, most_s=0.5, healthy_s=10)
    assert [backoff.after(0.0) for _ in range(4)] == [0.1, 0.2, 0.4, 0.5]
    assert backoff.after(11.0) == 0.1
    assert [backoff.after(0.0), backoff.after(0.0, useful=True)] == [0.2, 0.1]


def line(devices=1):
    entry = Entry(id="m", tasks=["encode"], source="file:///")
    return Line(entry, "interactive", devices=devices, window_items=20, budget_tokens=1024)


def pull(one, delivered):
    one.promised = one.next_pull()
    for _ in range(delivered):
        one.on_delivery()
    one.on_pull_end()


def test_device_batch_begins_behind_others_of_its_process_only():
    """Two processes of a device run side by side; in one, the second batch waits for the first."""
    device, begun = Device("cpu:0"), []
    first = device.on_sent(1.0, 0.0, "a", "torch")
    behind = device.on_sent(1.0, 0.0, "b", "torch")
    assert (first.begun, behind.begun, device.stage_s) == (True, False, pytest.approx(0.9))
    behind.on_begun = lambda: begun.append("behind")
    device.on_back(first, 1.0, lost=False)
    assert (begun, device.stage_s) == (["behind"], pytest.approx(1.9))
    beside = device.on_sent(1.0, 1.0, "c", "onnx")
    assert beside.begun
    device.on_back(behind, 2.0, lost=False)
    assert device.leading is beside


def test_device_batch_behind_one_that_was_lost_has_not_begun():
    """What waited in a process that died is no suspect; what ran in another process is."""
    device = Device("cpu:0")
    first = device.on_sent(1.0, 0.0, "a", "torch")
    behind = device.on_sent(1.0, 0.0, "b", "torch")
    device.on_back(first, 1.0, lost=True)
    assert not behind.begun


def test_breaker_counts_whole_failures_of_several_requests():
    """Three failed batches of three requests replace a process, three more let it rest, longer."""
    breaker, place = Breaker(), ("cpu:0", "m@1")
    assert {breaker.on_failure(place, ["one"]) for _ in range(20)} == {("go on", 0.0)}
    breaker.on_success(place)
    advice = [breaker.on_failure(place, [f"r{n}"]) for n in range(12)]
    assert [word for word, _ in advice if word != "go on"] == ["renew", "rest", "rest", "rest"]
    rests = [rest_s for _, rest_s in advice if rest_s]
    assert rests == [FIRST_REST_S, 2 * FIRST_REST_S, 4 * FIRST_REST_S]
    assert breaker.on_failure(("cpu:1", "m@1"), ["r"]) == ("go on", 0.0)
    breaker.on_success(place)
    assert [breaker.on_failure(place, [f"s{n}"])[0] for n in range(3)] == ["go on"] * 2 + ["renew"]
    for n in range(60):
        _, rest_s = breaker.on_failure(place, [f"t{n}"])
        assert rest_s <= MOST_REST_S


def test_line_pulls_more_after_full_pulls_and_little_after_empty_ones():
    """A busy line grows its pulls, an idle one promises little."""
    one = line()
    assert one.next_pull() == FIRST_PULL
    pull(one, FIRST_PULL)
    assert one.next_pull() == 20 - FIRST_PULL  # twice as many, but for the window's room
    for _ in range(FIRST_PULL):
        one.on_prepared(5)
    assert one.next_pull() == 2 * FIRST_PULL
    pull(one, 0)
    assert one.next_pull() == FIRST_PULL


def test_line_never_holds_more_than_its_bound():
    """What waits, runs and is being prepared all take room; none is left, nothing is pulled."""
    one = line()
    item = Item("a", "m", "interactive", (one.budget_tokens * 4,), 0.0, 0.0)
    batch = Batch("m", "interactive", (item,), Work.of_packed(item.lengths_tokens), 0.1, 1024)
    one.on_added(item)
    assert one.next_pull() == 0
    one.on_sent(batch)
    assert one.next_pull() == 0
    one.on_back(batch)
    assert one.next_pull() > 0
    one.promised = 3
    assert one.next_pull() == 0  # one pull at a time


def test_line_pulls_an_item_for_each_device_however_large_items_are():
    """Items that are each larger than the bound of held work run on all devices all the same."""
    one = line(devices=2)
    most_tokens = one.budget_tokens * 8
    items = [Item(name, "m", "interactive", (most_tokens,), 0.0, 0.0) for name in "ab"]
    one.on_added(items[0])
    assert one.next_pull() == 1
    batch = Batch("m", "interactive", (items[0],), Work.of_packed((most_tokens,)), 0.1, 1024)
    one.on_sent(batch)
    assert one.next_pull() == 1
    one.on_added(items[1])
    assert one.next_pull() == 0
    one.on_back(batch)
    assert one.next_pull() == 1


def test_bounds_bytes_of_a_line():
    """Files that wait here take room by their bytes, however few tokens they cost."""
    one = line()
    item = Item("a", "m", "interactive", (1,), 0.0, 0.0, size_bytes=MAX_WAITING_BYTES)
    one.on_added(item)
    assert one.next_pull() == 0
    one.on_removed([item])
    assert one.next_pull() > 0


def test_prepare_switches_off_the_files_own_padding_and_truncation(minilm):
    """The file says 128 and pads to it; lengths here are the text's own."""
    entry, tokeniser = minilm
    made = run_item(entry, IDS, tokeniser, envelope(), Inputs(texts=["hello", "word " * 200]))
    assert made.lengths == [3, 202]
    assert sequences(made)[0] == [101, 7592, 102]


def test_prepare_refuses_or_cuts_what_is_too_long(minilm):
    """257 tokens are refused by the input's index, or cut with the last token still there."""
    entry, tokeniser = minilm
    inputs = Inputs(texts=["short", "word " * 255])
    with pytest.raises(InputTooLong, match="257 tokens") as caught:
        run_item(entry, IDS, tokeniser, envelope(), inputs)
    assert caught.value.input_index == 1
    made = run_item(entry, IDS, tokeniser, envelope(truncate=True), inputs)
    assert (made.lengths, sequences(made)[1][-1]) == ([3, 256], 102)


def test_prepare_checks_ids_that_the_caller_made(minilm):
    """Ids outside the vocabulary are refused, over-long lists are refused or cut."""
    entry, tokeniser = minilm
    assert run_item(entry, IDS, tokeniser, envelope(), Inputs(ids=[[101, 5, 102]])).lengths == [3]
    with pytest.raises(InvalidRequest, match="40000"):
        run_item(entry, IDS, tokeniser, envelope(), Inputs(ids=[[101], [40000]]))
    with pytest.raises(InputTooLong):
        run_item(entry, IDS, tokeniser, envelope(), Inputs(ids=[[7] * 300]))
    cut = run_item(entry, IDS, tokeniser, envelope(truncate=True), Inputs(ids=[[7] * 300]))
    assert cut.lengths == [256]


def test_prepare_lays_out_scores_pairs_and_joint_pairs(minilm):
    """A query goes first, pairs alternate, and a joint model reads both texts at once."""
    entry, tokeniser = minilm
    score = Inputs(texts=["b", "c"], query="a")
    shared = run_item(entry, IDS, tokeniser, envelope("score"), score)
    assert (shared.layout, len(shared.lengths)) == ("shared", 3)
    pairs = Inputs(texts=["b"], firsts=["a"])
    laid = run_item(entry, IDS, tokeniser, envelope("classify"), pairs)
    assert (laid.layout, len(laid.lengths)) == ("pairs", 2)
    joint = msgspec.structs.replace(entry, scorer="joint")
    read = run_item(joint, IDS, tokeniser, envelope("score"), score)
    assert (read.layout, read.lengths, read.second_at) == ("single", [5, 5], [3, 3])


def test_prepare_puts_prompts_before_texts(minilm):
    """A named prompt, and those of the two sides of a score, are part of the sequence."""
    entry, tokeniser = minilm
    entry = msgspec.structs.replace(entry, prompts={"query": "q: ", "document": "d: "})
    plain = run_item(entry, IDS, tokeniser, envelope(), Inputs(texts=["x"]))
    asked = run_item(entry, IDS, tokeniser, envelope(prompt="query"), Inputs(texts=["x"]))
    assert (plain.lengths, asked.lengths) == ([3], [5])
    scored = run_item(entry, IDS, tokeniser, envelope("score"), Inputs(texts=["x"], query="x"))
    assert scored.lengths == [5, 5]
    with pytest.raises(InvalidRequest, match="prompt"):
        run_item(entry, IDS, tokeniser, envelope(prompt="none"), Inputs(texts=["x"]))


def test_prepare_sends_texts_to_a_runtime_without_ids(minilm):
    """Such a runtime gets the texts, and token ids for it are the caller's error."""
    entry, _ = minilm
    made = run_item(entry, TEXTS, None, envelope(), Inputs(texts=["one two three four"]))
    assert (made.texts, made.ids, made.lengths) == (["one two three four"], b"", [5])
    with pytest.raises(InvalidRequest, match="token ids"):
        run_item(entry, TEXTS, None, envelope(), Inputs(ids=[[1]]))


def test_tokeniser_of_a_broken_file_is_a_model_fault(tmp_path):
    """A file that is no tokenizer is a model that cannot be served, not a crash."""
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelUnavailable, match="no tokenizer"):
        Tokeniser(tmp_path / "tokenizer.json", 16)
