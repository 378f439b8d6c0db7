"""What travels: frames, envelopes, arrays. Anything that is not ours is refused, not crashed on."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import Bug, InputTooLong, ShoalError
from shoal.wire import envelope as wire
from shoal.wire.arrays import ITEM_BYTES, Array, concat
from shoal.wire.frames import FrameDecoder, FrameTooLarge, frame


@given(st.lists(st.binary(max_size=200), max_size=10), st.data())
def test_frames_survive_any_cut(payloads, data):
    """However the stream is cut, the same frames come out."""
    stream = b"".join(frame(p) for p in payloads)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    edges = [0, *sorted(cuts), len(stream)]
    decoder = FrameDecoder()
    got = [f for a, b in itertools.pairwise(edges) for f in decoder.feed(memoryview(stream)[a:b])]
    assert got == payloads
    assert decoder.pending_bytes == 0


def test_frames_are_bounded_both_ways():
    """A frame over the bound is refused before it is kept, and before it is sent."""
    with pytest.raises(FrameTooLarge):
        FrameDecoder(max_frame_bytes=10).feed(b"\xff\xff\xff\xff")
    with pytest.raises(FrameTooLarge):
        frame(b"x" * 11, max_frame_bytes=10)


def made(**more):
    fields = {
        "item": "r.0",
        "request": "r",
        "index": 0,
        "of": 1,
        "task": "encode",
        "model": "m",
        "revision": "1",
        "lane": "bulk",
        "cost_tokens": 3,
        "n_inputs": 1,
        "deadline_s": 2.0,
        "submitted_s": 1.0,
        "reply": "inbox",
        "body": msgspec.Raw(wire.encode(wire.Inputs(texts=["a\0b"]))),
    }
    return wire.Envelope(**(fields | more))


def test_envelope_round_trips_with_its_body_undecoded():
    """Fields and the raw body arrive as they were sent."""
    sent = made(params=wire.Params(truncate=True, dimensions=3))
    got = wire.decode_envelope(wire.encode(sent))
    assert (got.params, got.lane, got.model) == (sent.params, "bulk", "m")
    assert wire.decode_inputs(bytes(got.body)).texts == ["a\0b"]


def test_envelope_ignores_fields_of_a_newer_minor_version():
    """A field that a newer peer added is passed over."""
    raw = msgspec.msgpack.decode(wire.encode(made())) | {"from_the_future": [1, 2]}
    assert wire.decode_envelope(msgspec.msgpack.encode(raw)).item == "r.0"


def test_envelope_of_another_major_version_is_refused_with_its_number():
    """An unknown major version is a clear cause, also where its fields are not ours."""
    for raw in (msgspec.msgpack.decode(wire.encode(made())) | {"v": 9}, {"v": 9, "x": 1}):
        with pytest.raises(wire.UnreadableMessage, match="version 9"):
            wire.decode_envelope(msgspec.msgpack.encode(raw))


@given(st.binary(max_size=64))
def test_envelope_decoders_refuse_any_other_bytes(data):
    """Noise raises the one error that the readers of queues expect."""
    for decode in (wire.decode_envelope, wire.decode_outcome, wire.decode_cancel):
        with pytest.raises(wire.UnreadableMessage):
            decode(data)


def test_failure_keeps_the_kind_of_its_error():
    """An error crosses processes and is the same error again."""
    error = InputTooLong("too long", param="input", retry_after_s=2.0, input_index=3)
    outcome = wire.Outcome("i", failure=wire.Failure.of(error))
    got = wire.decode_outcome(wire.encode(outcome)).failure.error()
    assert type(got) is InputTooLong
    assert vars(got) == vars(error)
    assert isinstance(got, ShoalError)


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_array_round_trips_every_dtype(dtype):
    """Values, dtype and shape survive, from big-endian memory too."""
    values = np.arange(6).reshape(2, 3).astype(dtype)
    for memory in (values, values.astype(values.dtype.newbyteorder(">"))):
        array = Array.of(memory)
        back = np.frombuffer(array.data, np.dtype(array.dtype).newbyteorder("<"))
        np.testing.assert_array_equal(back.reshape(array.shape), values)


def test_array_concat_joins_rows_and_refuses_other_kinds():
    """Joining is joining bytes; what does not fit together is our own bug, loudly."""
    a, b = Array.of(np.ones((2, 3), np.float32)), Array.of(np.zeros((1, 3), np.float32))
    joined = concat([a, b])
    assert (joined.shape, joined.rows()) == ([3, 3], [*a.rows(), *b.rows()])
    with pytest.raises(Bug):
        concat([a, Array.of(np.ones((1, 4), np.float32))])


@pytest.mark.parametrize(
    ("dtype", "shape", "data"), [("float32", [2], b"1234"), ("complex64", [1], b"12345678")]
)
def test_array_refuses_a_wrong_size_and_an_unknown_dtype(dtype, shape, data):
    """A block that is not what it says never becomes an array."""
    with pytest.raises(ValueError, match=r"needs|one of"):
        Array(dtype, shape, data)
