"""The form of a line in every log: time with its zone, level, logger, message; as text or as JSON."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime

FORMAT_VARIABLE = "DYNAPLAN_LOG_FORMAT"
"""The environment variable with the form of the lines, ``text`` or ``json``."""

FIELDS = "fields"
"""The attribute of a record with further fields, a mapping of plain values: ``extra={FIELDS: {...}}``."""


class LogLines(logging.Formatter):
    """Writes the time as decisions have it: UTC, in milliseconds, ``2026-01-31T12:00:00.000+00:00``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class JsonLogLines(LogLines):
    """Writes each record as one JSON object: time, level, logger, message, its fields, its exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as the text of one JSON object, without a line break."""
        line = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_lines() -> LogLines:
    """Return the form that the environment asks for; text unless it says ``json``."""
    return JsonLogLines() if os.environ.get(FORMAT_VARIABLE) == "json" else LogLines()
