"""A generated text, read from its events."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.client.texts import MAX_EVENT_BYTES, Generated, Reading
from shoal.errors import Bug, InputTooLong, PayloadTooLarge, RuntimeCrashed, Unreachable

END = {
    "model": "m",
    "data": [{"index": 0, "finish_reason": "length", "tokens": 3}],
    "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
}


def events(*told: dict) -> bytes:
    return b"".join(f"data: {json.dumps(one, ensure_ascii=False)}\n\n".encode() for one in told)


def pieces(*texts: str) -> list[dict]:
    return [{"index": 0, "text": text} for text in texts]


@settings(max_examples=20)
@given(
    st.lists(st.text(st.characters(codec="utf-8"), min_size=1), max_size=5),
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
)
def test_reading_gives_the_same_parts_however_the_bytes_are_cut(texts, sizes):
    """Wherever the connection cuts the bytes, the parts are the events' and joined the whole."""
    data, reading = events(*pieces(*texts), END), Reading()
    found = []
    at = 0
    while at < len(data):
        size = sizes[at % len(sizes)]
        found += reading.feed(data[at : at + size])
        at += size
    reading.end()
    assert found == texts
    assert reading.generated == Generated("".join(texts), "length", 3, 2)


def test_reading_passes_over_comments_and_other_fields():
    """Comments, names of events and carriage returns are no part of the text."""
    reading = Reading()
    data = b": waiting\n\nevent: piece\r\nid: 1\r\n" + events(*pieces("a")).replace(b"\n", b"\r\n")
    assert list(reading.feed(data)) == ["a"]


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ({"code": "runtime_crashed", "message": "gone", "request_id": "r1"}, RuntimeCrashed),
        ({"code": "input_too_long", "message": "long", "param": "inputs[0]"}, InputTooLong),
    ],
)
def test_reading_raises_the_error_that_an_event_tells_of(told, kind):
    """An error in the middle of a text is raised as its kind, after the parts before it."""
    reading = Reading()
    parts = reading.feed(events(*pieces("a", "b"), {"error": told}))
    assert [next(parts), next(parts)] == ["a", "b"]
    with pytest.raises(kind) as failed:
        next(parts)
    assert (failed.value.message, failed.value.param) == (told["message"], told.get("param"))
    assert getattr(failed.value, "__notes__", []) == (
        [f"request id: {told['request_id']}"] if "request_id" in told else []
    )


def test_reading_tells_an_end_that_came_too_early():
    """Without its last event the text has not ended, and nothing gives half of it as the whole."""
    reading = Reading()
    assert list(reading.feed(events(*pieces("a")) + b'data: {"index"')) == ["a"]
    with pytest.raises(Unreachable, match="before the text did"):
        reading.end()
    with pytest.raises(Bug, match="not come to its end"):
        _ = reading.generated


def test_reading_refuses_what_is_no_event_of_a_server():
    """What cannot be read is an error, and an event without an end is given up at its bound."""
    with pytest.raises(Bug, match="cannot be read"):
        list(Reading().feed(b"data: <html>\n"))
    reading = Reading()
    assert list(reading.feed(b"data: " + b"x" * (MAX_EVENT_BYTES - 6))) == []
    with pytest.raises(PayloadTooLarge):
        list(reading.feed(b"x"))
