"""What a delivery's reply subject says."""

from __future__ import annotations

import pytest
from nats.js.api import KeyValueConfig

from shoal.queue.deliveries import JetStreamDelivery
from shoal.queue.link import Link
from shoal.queue.untouched import Untouched

REPLIES = {
    "plain": b"$JS.ACK.work.bulk-m=401.%d.17.4.1700000000000000001.12",
    "domain": b"$JS.ACK.hub.accHASH.work.bulk-m=401.%d.17.4.1700000000000000001.12.rnd",
}


@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
def test_delivery_attempt_is_the_deliveries_that_were_not_untouched(reply):
    """Of either form of a reply the attempt is read, less what was said of the same item."""
    link = Link()
    untouched = Untouched(link, KeyValueConfig(bucket="untouched"))

    def attempts():
        deliveries = [JetStreamDelivery(link, untouched, reply % n, b"") for n in (1, 2, 5)]
        return [delivery.attempt for delivery in deliveries]

    assert attempts() == [1, 2, 5]
    for name in (b"17-1700000000000000002", b"18-1700000000000000001"):
        untouched._on_count(name, b"3")
    assert attempts() == [1, 2, 5]
    untouched._on_count(b"17-1700000000000000001", b"3")
    for said in (b"1", b"", b"-4", b"x"):  # late, or no count at all
        untouched._on_count(b"17-1700000000000000001", said)
    assert attempts() == [1, 1, 2]
