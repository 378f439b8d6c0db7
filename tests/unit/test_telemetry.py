import io
import logging

import pytest

from shoal.telemetry import fields, setup_logging, without_password


@pytest.fixture
def out():
    """The stream that this process logs to; what was set up before comes back afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("shoal")
    before = (root.handlers[:], root.level, ours.level)
    stream = io.StringIO()
    setup_logging("info", "gateway", stream)
    yield stream
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


def test_log_line_has_time_level_process_logger_message_and_fields(out):
    """A line reads: time, level, process, logger, message, key=value."""
    logging.getLogger("shoal.x").info("listening on %d", 5, extra=fields(host="::1", wait_s=0.5))
    moment, rest = out.getvalue().split(" ", 1)
    assert rest == "info    gateway shoal.x: listening on 5 host=::1 wait_s=0.5\n"
    assert moment.endswith("Z")
    assert len(moment) == len("2026-01-01T00:00:00.000Z")


def test_log_level_hides_what_is_less_severe(out):
    """At level info, debug is silent; a library speaks from warning upwards."""
    logging.getLogger("shoal.x").debug("no")
    logging.getLogger("nats").info("no")
    logging.getLogger("nats").warning("yes")
    assert out.getvalue().count("\n") == 1


def test_log_never_shows_a_secret(out):
    """Fields with the name of a secret and passwords in URLs are replaced; counts are not."""
    log = logging.getLogger("shoal.x")
    secrets = {"nats_token": "t0ken", "api_key": "k3y", "url": "a://b@c"}
    log.info("to nats://ann:pa55@h:1", extra=fields(**secrets, batch_tokens=17))
    error = ValueError("nats://ann:pa55@h:1")
    log.error("failed", exc_info=error)
    text = out.getvalue()
    assert not [secret for secret in ("pa55", "t0ken", "k3y", "b@c") if secret in text]
    assert "batch_tokens=17" in text
    assert "ValueError: nats://***@h:1" in text
    assert without_password("to nats://t@a:1, nats://b:2") == "to nats://***@a:1, nats://b:2"


def test_log_line_cannot_be_forged(out):
    """Line breaks and spaces in a message or a value are escaped."""
    bad = "x\n2026-01-01 error"
    logging.getLogger("shoal.x").info(bad, extra=fields(model=bad, empty=""))
    assert out.getvalue().count("\n") == 1
    assert 'model="x\\n2026' in out.getvalue()
    assert 'empty=""' in out.getvalue()


def test_log_value_is_bounded(out):
    """A huge value does not fill the log."""
    logging.getLogger("shoal.x").info("m", extra=fields(text="x" * 1_000_000))
    assert len(out.getvalue()) < 3_000
