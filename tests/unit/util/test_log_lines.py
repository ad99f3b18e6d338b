"""The form of a line in every log."""

from __future__ import annotations

import logging

from dynaplan.util.log_lines import LogLines


def test_a_line_begins_with_the_time_and_its_zone_as_decisions_do() -> None:
    record = logging.LogRecord("room", logging.INFO, "", 0, "so it %s", ("is",), None)
    record.created = 1767268800.0425
    assert LogLines().format(record) == "2026-01-01T12:00:00.042+00:00 INFO room: so it is"
