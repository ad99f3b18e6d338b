"""Durations: read from a command line, and shown."""

from __future__ import annotations

import pytest

from dynaplan.util.durations import clock, seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("10m", 600),
        ("2h", 7200),
        ("1d", 86400),
        ("1h30m", 5400),
        (" 2H ", 7200),
        ("0s", 0),
        ("1d2h3m4s", 93784),
    ],
)
def test_a_duration_is_read(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "text", ["", " ", "2", "h", "-2h", "1.5h", "2 h", "30m1h", "²h", "9999999999s", "2w", "nan"]
)
def test_any_other_text_is_no_duration(text: str) -> None:
    assert seconds_of(text) is None


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "00:00"), (-5, "00:00"), (63.9, "01:03"), (3723, "1:02:03"), (90_000, "1 d 1:00:00")],
)
def test_a_time_is_shown_as_a_clock_shows_it(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown
