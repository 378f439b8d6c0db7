"""The reader of NATS messages: whole, cut anywhere, mixed with everything else of the protocol."""

from __future__ import annotations

import pytest
from nats.errors import OutboundBufferLimitError, ProtocolError

from shoal.queue.link import Link
from tests.conftest import run

STREAM = (
    b"MSG a.b 1 5\r\nhello\r\n"
    b"+OK\r\n"
    b"MSG a.c 1 reply.to 0\r\n\r\n"
    b"HMSG a.d 1 12 17\r\nNATS/1.0\r\n\r\nhello\r\n"
    b"PONG\r\n"
    b"HMSG a.e 1 answer 16 16\r\nNATS/1.0 503\r\n\r\n\r\n"
    b"MSG a.f 1 12\r\nMSG x 1 1\r\ny\r\n"
)
MESSAGES = [
    (b"a.b", b"", b"", b"hello"),
    (b"a.c", b"reply.to", b"", b""),
    (b"a.d", b"", b"NATS/1.0\r\n\r\n", b"hello"),
    (b"a.e", b"answer", b"NATS/1.0 503\r\n\r\n", b""),
    (b"a.f", b"", b"", b"MSG x 1 1\r\ny"),
]


def reader(got):
    """A link that is not connected, whose subscription 1 appends to `got`."""
    link = Link()
    link._handlers[b"1"] = lambda *message: got.append(message)
    return link._ps


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20, len(STREAM)])
def test_link_reads_messages_however_they_are_cut(size):
    """Every message arrives once, complete and in order, wherever a read ends."""

    async def main():
        got = []
        parser = reader(got)
        for at in range(0, len(STREAM), size):
            await parser.parse(STREAM[at : at + size])
        assert got == MESSAGES

    run(main())


def test_link_reads_on_after_a_handler_failed(caplog):
    """A handler that raises loses its own message and no other."""

    async def main():
        got = []
        link = Link()

        def fussy(_subject, _reply, _headers, data):
            got.append(data)
            if data == b"bad":
                raise KeyError(data)

        link._handlers[b"1"] = fussy
        await link._ps.parse(b"MSG a 1 3\r\nbad\r\nMSG a 1 4\r\ngood\r\n")
        assert got == [b"bad", b"good"]
        assert "could not be handled" in caplog.text

    run(main())


@pytest.mark.parametrize("line", [b"MSG a 1 many\r\n", b"MSG\r\n", b"nonsense\r\n", b"\r\n"])
def test_link_says_what_is_no_nats(line):
    """A line that is none of the protocol's is a protocol error, which makes nats-py reconnect."""
    with pytest.raises(ProtocolError):
        run(reader([]).parse(line))


def test_link_forgets_half_a_message_with_its_connection():
    """After a reset the rest of an old message is not taken for the start of a new one."""

    async def main():
        got = []
        parser = reader(got)
        await parser.parse(b"MSG a 1 5\r\nhel")
        parser.reset()
        await parser.parse(b"MSG a 1 3\r\nnew\r\n")
        assert [message[3] for message in got] == [b"new"]

    run(main())


def test_link_refuses_to_send_before_it_is_connected():
    """Nothing is kept for a connection that was never made."""
    with pytest.raises(OutboundBufferLimitError):
        Link().send(b"a", b"x")
