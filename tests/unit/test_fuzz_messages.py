"""Whatever bytes arrive, a decoder returns a message or raises its one documented error."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.errors import ProtocolError

from shoal.errors import ShoalError
from shoal.ipc import messages as ipc
from shoal.queue.link import Link, _Reader
from shoal.wire import envelope as wire
from shoal.wire.arrays import Array
from shoal.wire.frames import FrameDecoder, FrameTooLarge, frame
from tests.support.mutations import BINARY, FUZZ, NASTY, damaged, values

pytestmark = pytest.mark.slow

REF = wire.PayloadRef("k" * 32, 7, "0" * 64)
FAILURE = wire.Failure("queue_full", "full", "input", 1.5, 3)
INPUTS = wire.Inputs(["a", "b"], query="q", firsts=["c", "d"])
RESULT = wire.Result({"dense": Array("float32", [2, 1], bytes(8))}, ["no", "yes"])
ENVELOPE = wire.Envelope(
    *("i.0", "i", 0, 1, "encode", "m", "1", "bulk", 9, 2, 1e9, 1e9, "reply"),
    params=wire.Params(["dense"], "query", True, 8, False),
    body=msgspec.Raw(wire.encode(INPUTS)),
    payload=REF,
    tenant="t",
    traceparent="00-0-0-00",
)
TIMING = wire.Timing(1.0, 2.0, 3.0)
OUTCOME = wire.Outcome("i.0", msgspec.Raw(wire.encode(RESULT)), FAILURE, REF, 5, TIMING, "w")
STATE = wire.ModelState("m", "resident", "", 1e-4, 4.0)
GOOD = {
    wire.decode_inputs: INPUTS,
    wire.decode_result: RESULT,
    wire.decode_envelope: ENVELOPE,
    wire.decode_outcome: OUTCOME,
    wire.decode_cancel: wire.Cancel("i"),
    wire.decode_status: wire.Status("w", [STATE], 2, 5, True),
    wire.decode_backlog: wire.Backlog("g", {"bulk": {"m": 7}}),
    wire.decode_dead_letter: wire.DeadLetter(b"e", FAILURE, 4, "w", 1e9, "m", "i.0", b"b"),
}
SPEC = ipc.ModelSpec(
    *("m@1", "/m", "/c", ["encode"]),
    weights="w",
    heads={"score": ipc.HeadSpec("pair", "f", "p.", ["no", "yes"], "yes")},
    options={"dim": 8},
)
RUN_ITEM = ipc.RunItem("i", "encode", [2], ids=b"\0\1\0\2", second_at=[1], texts=["a"])
CALLS = [
    ipc.Load(1, SPEC),
    ipc.Unload(2, "m@1"),
    ipc.Run(3, "m@1", [RUN_ITEM], 64),
    ipc.AskMemory(4),
]
ANSWERS = [
    ipc.Hello("null", "1", 9, ipc.Traits(True, ["encode"])),
    ipc.Loaded(1, 5, 0.5),
    ipc.Ran(3, [ipc.ItemDone("i", msgspec.Raw(wire.encode(RESULT)), FAILURE)], 0.5, 9),
    ipc.Memory(4, 9, {"m@1": 3}),
    ipc.Failed(5, FAILURE),
]
PLAIN = msgspec.msgpack.Decoder()


def decode_or_refuse(decode, data):
    """Decodes; the documented refusal is fine, and anything else fails the test."""
    try:
        return decode(data)
    except wire.UnreadableMessage:
        return None


@pytest.mark.parametrize("decode", GOOD)
@FUZZ
@given(data=st.data())
def test_fuzz_queue_messages_are_read_or_refused(decode, data):
    """Damaged bytes and foreign types of every message of the queue end in UnreadableMessage."""
    good = wire.encode(GOOD[decode])
    decode_or_refuse(decode, data.draw(damaged([good, b""])))
    plain = data.draw(values([PLAIN.decode(good)], [*NASTY, *BINARY]))
    decode_or_refuse(decode, msgspec.msgpack.encode(plain))


@FUZZ
@given(data=st.data())
def test_fuzz_failure_is_always_some_error_of_ours(data):
    """Whatever code and fields a failure names, it becomes an error of the tree."""
    plain = data.draw(values([PLAIN.decode(wire.encode(OUTCOME))]))
    outcome = decode_or_refuse(wire.decode_outcome, msgspec.msgpack.encode(plain))
    if outcome is not None and outcome.failure is not None:
        assert isinstance(outcome.failure.error(), ShoalError)


@pytest.mark.parametrize(
    ("decode", "good"),
    [(ipc.decode_call, CALLS), (ipc.decode_answer, ANSWERS)],
    ids=["calls", "answers"],
)
@FUZZ
@given(data=st.data())
def test_fuzz_socket_messages_are_read_or_refused(decode, good, data):
    """Calls and answers between a worker and a runtime: a message, or UnreadableMessage."""
    packed = [ipc.encode(message) for message in good]
    decode_or_refuse(decode, data.draw(damaged(packed)))
    plain = data.draw(values([PLAIN.decode(each) for each in packed], [*NASTY, *BINARY]))
    decode_or_refuse(decode, msgspec.msgpack.encode(plain))


@pytest.mark.parametrize("decode", [*GOOD, ipc.decode_call, ipc.decode_answer])
@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 200_000,
        b"\x81\xa1v" + b"\x91" * 200_000,
        b"\x81\xa4body" + b"\x81\xa1a" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
    ],
    ids=["deep", "deep field", "deep body", "array", "map", "bytes", "text"],
)
def test_fuzz_bombs_are_refused(decode, data):
    """Nesting without end and lengths of gigabytes are refused at once, without their memory."""
    with pytest.raises(wire.UnreadableMessage):
        decode(data)


@FUZZ
@given(st.lists(st.binary(max_size=40), max_size=6), st.data())
def test_fuzz_frames_come_out_whatever_the_pieces(payloads, data):
    """Frames are the same in any pieces, and what is kept is less than one frame."""
    stream = b"".join(map(frame, payloads))
    decoder, found = FrameDecoder(), []
    at = 0
    while at < len(stream):
        size = data.draw(st.integers(1, 60))
        found += decoder.feed(stream[at : at + size])
        at += size
        assert decoder.pending_bytes < 4 + 40
    assert found == payloads
    assert decoder.pending_bytes == 0


@FUZZ
@given(st.lists(st.binary(max_size=64), max_size=20))
def test_fuzz_frames_of_noise_are_bounded(pieces):
    """Noise gives frames within the bound or FrameTooLarge, and never keeps more than a frame."""
    decoder = FrameDecoder(max_frame_bytes=100)
    for piece in pieces:
        try:
            frames = decoder.feed(piece)
        except FrameTooLarge:
            return
        assert all(len(each) <= 100 for each in frames)
        assert decoder.pending_bytes < 104


BROKER = [
    b"MSG a.b 1 5\r\nhello\r\n",
    b"MSG a.b 1 reply.to 5\r\nhello\r\n",
    b"HMSG a.b 1 12 17\r\nNATS/1.0\r\n\r\nhello\r\n",
    b"PING\r\n",
    b"+OK\r\n",
]


@FUZZ
@given(st.lists(damaged(BROKER), max_size=4), st.integers(1, 40))
def test_fuzz_broker_messages_are_read_or_the_connection_is_given_up(lines, size):
    """Noise from a broker is read, passed over, or a ProtocolError; it never loops or hangs."""

    async def feed() -> None:
        link = Link()
        reader = _Reader(link, {b"1": lambda *_: None})
        reader.reset()
        stream = b"".join(line for line in lines if b"PING" not in line and b"+" not in line)
        for at in range(0, len(stream), size):
            await reader.parse(stream[at : at + size])

    with suppress(ProtocolError):
        asyncio.run(feed())


@pytest.mark.parametrize("size", [b"-7", b"999999999999", b"x", b""])
def test_fuzz_broker_message_of_an_impossible_size_is_refused(size):
    """A size below zero would be read for ever, a gigantic one would be kept: both are refused."""
    reader = _Reader(Link(), {b"1": lambda *_: None})
    reader.reset()
    with pytest.raises(ProtocolError):
        asyncio.run(reader.parse(b"MSG a.b 1 %b\r\nhello\r\n" % size))
