"""Texts that grow at the gateway: their pieces, their ends and their times."""

from __future__ import annotations

import pytest

from shoal.errors import RuntimeCrashed
from shoal.gateway.growth import Growth
from shoal.gateway.jobs import End, Grew
from shoal.gateway.timing import server_timing, speed_of
from shoal.wire.envelope import Outcome, Result, Timing
from shoal.wire.generation import Generated, Piece, TokenLogprob, pack


def text(words="a b", tokens=2, **fields):
    return Generated(words, "stop", 3, tokens, **fields)


def add(growth, index, at, worker, piece):
    growth.piece(index, Outcome("i", at=at, worker=worker, timing=Timing(queue_s=at)), piece)


def result(generated):
    return Result(records=[pack(generated)])


def grown(growth):
    """What was taken, with texts for pieces."""
    return [
        (index, event.piece.text if isinstance(event, Grew) else event)
        for index, event in growth.take()
    ]


def test_growth_pieces_that_nobody_took_come_as_one():
    """A slow reader gets fewer and larger pieces, each text's in order, and its end behind them."""
    growth = Growth(2)
    for at, word in enumerate("abc"):
        add(growth, 1, at, "w", Piece(word, 1))
    add(growth, 0, 0, "w", Piece("x", 1))
    assert grown(growth) == [(1, "abc"), (0, "x")]
    assert not growth.news
    whole = text("abcd", 4)
    add(growth, 1, 3, "w", Piece("d", 1))
    growth.end(1, result(whole), Timing(run_s=1.0))
    assert grown(growth) == [(1, "d"), (1, End(whole, Timing(run_s=1.0)))]


def test_growth_mends_a_lost_piece_from_the_whole():
    """Behind a gap nothing is told until the end, which has all of it, logarithms too."""
    growth = Growth(1)
    tokens = [TokenLogprob(word, -0.5) for word in "abcd"]
    add(growth, 0, 0, "w", Piece("a", 1, tokens[:1]))
    add(growth, 0, 2, "w", Piece("c", 1, tokens[2:3]))
    add(growth, 0, 3, "w", Piece("d", 1, tokens[3:]))
    assert grown(growth) == [(0, "a")]
    growth.end(0, result(text("abcd", 4, logprobs=tokens)), Timing())
    (_, grew), _ = growth.take()
    rest = grew.piece
    assert (rest.text, rest.tokens, rest.logprobs) == ("bcd", 3, tokens[1:])


def test_growth_without_any_piece_is_told_at_the_end():
    """A text of which every piece was lost comes as one."""
    growth = Growth(1)
    growth.end(0, result(text("ab")), Timing())
    assert next(event for _, event in grown(growth)) == "ab"


@pytest.mark.parametrize("worker", ["w", "another"])
def test_growth_that_begins_anew_ends_the_stream_once_something_was_told(worker):
    """A text that was told in part cannot be told again; one of which nothing was can."""
    growth = Growth(1)
    add(growth, 0, 0, "w", Piece("", 1))
    add(growth, 0, 0, worker, Piece("a", 1))
    add(growth, 0, 1, worker, Piece("b", 1))
    assert grown(growth)[-1] == (0, "ab")
    with pytest.raises(RuntimeCrashed, match="anew"):
        add(growth, 0, 0, worker, Piece("c", 1))


def test_growth_never_joins_two_texts():
    """Neither a later piece of another worker nor another whole text goes on with what was told."""
    growth = Growth(1)
    add(growth, 0, 0, "w", Piece("a", 1))
    with pytest.raises(RuntimeCrashed, match="anew"):
        add(growth, 0, 1, "another", Piece("b", 1))
    with pytest.raises(RuntimeCrashed, match="anew"):
        growth.end(0, result(text("xyz")), Timing())


def test_timing_of_texts_is_weighted_by_their_tokens():
    """A mean over all further tokens, and none of a text of one token."""
    speed = speed_of(
        [text(tokens=3, token_s=0.2), text(tokens=2, token_s=0.5), text(tokens=1)], 0.1
    )
    assert speed.token_s == pytest.approx((2 * 0.2 + 0.5) / 3)
    header = server_timing(Timing(run_s=1.0), speed)
    assert (
        header
        == b"queue;dur=0.00, load;dur=0.00, run;dur=1000.00, ttft;dur=100.00, tpot;dur=300.00"
    )
    assert speed_of([text(tokens=1)], 0.1).token_s == 0
