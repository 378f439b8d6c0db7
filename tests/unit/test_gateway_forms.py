"""Content negotiation."""

from __future__ import annotations

import pytest

from shoal.errors import UnsupportedMedia
from shoal.gateway.forms import JSON, MSGPACK, sent_form, wanted_form


@pytest.mark.parametrize(
    ("header", "form"),
    [
        (None, JSON),
        (b"", JSON),
        (b"application/json", JSON),
        (b"Application/JSON; charset=utf-8", JSON),
        (b"application/msgpack", MSGPACK),
        (b"application/x-msgpack", MSGPACK),
        (b"application/vnd.msgpack;v=5", MSGPACK),
    ],
)
def test_forms_content_type(header, form):
    """Case and parameters of a Content-Type do not matter; a missing one is JSON."""
    assert sent_form(header) is form


@pytest.mark.parametrize("header", [b"text/plain", b"json", b"multipart/form-data", b"\xff" * 5000])
def test_forms_content_type_unknown(header):
    """Any other Content-Type is refused, with a short message whatever its length."""
    with pytest.raises(UnsupportedMedia) as refused:
        sent_form(header)
    assert refused.value.param == "Content-Type"
    assert len(refused.value.message) < 600


@pytest.mark.parametrize(
    ("header", "form"),
    [
        (None, JSON),
        (b"*/*", JSON),
        (b"text/html, */*;q=0.8", JSON),
        (b"text/html", JSON),
        (b"application/msgpack", MSGPACK),
        (b"application/x-msgpack", MSGPACK),
        (b"application/msgpack, */*", MSGPACK),
        (b"application/msgpack, application/json", JSON),
        (b"application/msgpack, application/json;q=0.9", MSGPACK),
        (b"application/json;q=0.1, application/msgpack;q=0.2", MSGPACK),
        (b"application/msgpack;q=0", JSON),
        (b"application/msgpack;q=nonsense", JSON),
        (b",;,q=,", JSON),
    ],
)
def test_forms_accept(header, form):
    """The better quality wins, an exact name beats a range, and JSON is the fallback."""
    assert wanted_form(header) is form
