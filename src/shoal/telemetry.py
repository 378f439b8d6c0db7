"""What a process writes for people: one line of log per event, on standard error.

Owns the format (time, level, process, logger, message, then key=value fields), the levels, and
that no secret is printed. Metrics belong to the module that counts. Does not own what is logged.

    log.info("listening", extra=fields(host=host, port=port))
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any, TextIO

# `batch_tokens` is a number to be seen, `nats_token` is not.
_SECRET_NAME = re.compile(
    r"(^|.*_)(token|secret|password|passwd|authorization|key|creds|cookie)", re.IGNORECASE
)
_SECRET_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_PLAIN = re.compile(r"[^\s\"=\x00-\x1f\x7f]+")
MAX_VALUE_CHARS = 2_000


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """The `extra` of a log call: shown behind its message as key=value, in this order."""
    return {"fields": values}


def without_password(text: str) -> str:
    """Any text with the user part of its URLs replaced by `***`."""
    return _SECRET_IN_URL.sub("***", text)


def setup_logging(level: str, process: str, stream: TextIO | None = None) -> None:
    """Sends the log of this process to `stream` (standard error), from `level` upwards.

    level: debug, info, warning or error. process: its name in every line. Libraries speak from
    warning upwards. Calling it again replaces what it did before.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("shoal").setLevel(level.upper())


class LineFormatter(logging.Formatter):
    """One line per record; the lines of a traceback follow it, indented."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        parts = [
            f"{moment}.{int(record.msecs):03d}Z",
            f"{record.levelname.lower():7}",
            self._process,
            f"{record.name}:",
            _one_line(record.getMessage()),
        ]
        shown = getattr(record, "fields", None) or {}
        parts += [f"{name}={_value(name, value)}" for name, value in shown.items()]
        line = without_password(" ".join(parts))
        if record.exc_info:
            trace = without_password(self.formatException(record.exc_info))
            line += "\n  " + trace.replace("\n", "\n  ")
        return line


def _value(name: str, value: Any) -> str:
    if value is not None and _SECRET_NAME.fullmatch(name):
        return "***"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if len(text) > MAX_VALUE_CHARS:
        text = f"{text[:MAX_VALUE_CHARS]}..."
    # A value that came from a request must not be able to forge a line of log.
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text, ensure_ascii=False)[1:-1]
