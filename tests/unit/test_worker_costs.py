"""Costs kept across restarts, and when a device is free for its next batch."""

from __future__ import annotations

import msgspec
import pytest

from shoal.catalog.schema import Entry, Profile
from shoal.core.cost import Work
from shoal.core.types import Batch, Item
from shoal.worker.costs import CostBook
from shoal.worker.device import Device

ENTRY = Entry(
    id="m",
    tasks=["encode"],
    source="file:///",
    profile=Profile(tokens_per_s=1000.0, launch_ms=5.0),
)
WORK = Work(500, 25_000)


def test_cost_book_starts_from_the_profile(tmp_path):
    """Before anything ran, 500 tokens at 1,000 tokens/s and a launch of 5 ms."""
    book = CostBook(tmp_path / "costs.json", "cpux1")
    assert book.model(ENTRY).predict_s(WORK) == pytest.approx(0.505)


def test_cost_book_survives_a_restart_for_the_same_hardware_only(tmp_path):
    """What was learnt is an estimate for the next process, and not for another device."""
    book = CostBook(tmp_path / "costs.json", "cpux1")
    for _ in range(50):
        book.model(ENTRY).observe(WORK, 0.1)
    learnt_s = book.model(ENTRY).predict_s(WORK)
    assert learnt_s == pytest.approx(0.1, rel=0.1)
    book.save()
    again = CostBook(tmp_path / "costs.json", "cpux1")
    assert again.model(ENTRY).predict_s(WORK) == pytest.approx(learnt_s)
    other = CostBook(tmp_path / "costs.json", "cudax1")
    assert other.model(ENTRY).predict_s(WORK) == pytest.approx(0.505)


def test_cost_book_of_a_broken_file_begins_anew(tmp_path):
    """A damaged file costs what was learnt and nothing else."""
    (tmp_path / "costs.json").write_text("{ broken")
    book = CostBook(tmp_path / "costs.json", "cpux1")
    assert book.model(ENTRY).predict_s(WORK) == pytest.approx(0.505)
    book.save()
    assert CostBook(tmp_path / "costs.json", "cpux1").model(ENTRY)


def test_cost_book_rates_are_per_useful_token(tmp_path):
    """Padding is in the rate: 100 useful tokens that took a second are 10 ms each."""
    book = CostBook(tmp_path / "costs.json", "cpux1")
    items = (Item("i", "m", "interactive", (100,), 0.0, 0.0),)
    book.on_batch(ENTRY, Batch("m", "interactive", items, Work(400, 1), 1.0, 0), 1.0)
    book.on_text(ENTRY, 450, 100)
    rates = book.rates(ENTRY)
    assert (rates.token_s, rates.bytes_per_token) == (0.01, 4.5)


def run_batch(book, tokens, padded, took_s):
    items = (Item("i", "m", "interactive", (tokens,), 0.0, 0.0),)
    work = Work(padded, 64 * padded)
    book.on_batch(ENTRY, Batch("m", "interactive", items, work, 1.0, 0), took_s)
    book.model(ENTRY).observe(work, took_s)


def test_cost_book_text_costs_the_share_of_its_slot(tmp_path):
    """A text that grew alone in one of four slots costs a backlog a quarter of its time."""
    book = CostBook(tmp_path / "costs.json", "cpu x2")
    writer = msgspec.structs.replace(ENTRY, tasks=["generate"])
    book.on_text_grown(writer, 100, 2.0, 4)
    assert book.token_s(writer) == pytest.approx(2.0 / 100 / 4)
    for _ in range(50):
        book.on_text_grown(writer, 100, 6.0, 4)
    assert book.token_s(writer) == pytest.approx(6.0 / 100 / 4, rel=0.01)


def test_cost_book_small_batches_do_not_make_a_token_dear(tmp_path):
    """Two tokens that wait for a launch are no sign that thousands take as long each."""
    book = CostBook(tmp_path / "costs.json", "cpux1")
    assert book.token_s(ENTRY) == 0.0
    for _ in range(50):
        run_batch(book, 2, 2, 0.005 + 0.002)
    assert book.rates(ENTRY).token_s == pytest.approx(0.0035)
    # 0.1 s less a launch of 5 ms, at 1 ms a token: 95 tokens.
    assert book.token_s(ENTRY) == pytest.approx(0.1 / 95, rel=0.05)
    for _ in range(200):
        run_batch(book, 80, 95, 0.1)
        run_batch(book, 2, 2, 0.007)
    assert book.token_s(ENTRY) == pytest.approx(0.1 / 80, rel=0.1)


def test_device_takes_the_next_batch_when_the_running_one_is_about_to_end():
    """Idle: free. Busy: free a tenth before the expected end. Two ahead: not free."""
    device = Device("cpu#0")
    assert device.is_free(0.0)
    first = device.on_sent(1.0, 0.0)
    assert not device.is_free(0.85)
    assert device.is_free(0.91)
    second = device.on_sent(1.0, 0.91)
    assert not device.is_free(5.0)
    device.on_back(first, 1.2, lost=False)  # the second has begun
    assert not device.is_free(2.0)
    assert device.is_free(2.11)
    device.on_back(second, 2.2, lost=False)
    assert (device.is_free(2.2), device.in_flight) == (True, 0)


def test_device_knows_which_batch_a_crash_took():
    """The batch that ran when the process died had begun; the one behind it had not."""
    device = Device("cpu#0")
    first, second = device.on_sent(1.0, 0.0), device.on_sent(1.0, 0.9)
    for sent in (first, second):
        device.on_back(sent, 1.0, lost=True)
    assert (first.begun, second.begun) == (True, False)
