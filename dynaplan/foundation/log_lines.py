"""The form of a line in every log: time with its zone, level, logger, message."""

from __future__ import annotations

import logging
from datetime import UTC, datetime


class LogLines(logging.Formatter):
    """Writes the time as decisions have it: UTC, in milliseconds, ``2026-01-31T12:00:00.000+00:00``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Return the time of the record."""
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
