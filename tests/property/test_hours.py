"""Hours of every day in any zone, at any change of its clock."""

from __future__ import annotations

from datetime import UTC, datetime

import hypothesis.strategies as st
from hypothesis import given

from dynaplan.contract.holds import DailyHours, WallClock, parse_hours
from dynaplan.util.durations import wall_clock

ZONES = st.sampled_from(
    ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"]
).map(wall_clock)
MINUTES = st.integers(0, 24 * 60 - 1)
HOURS = st.builds(DailyHours, MINUTES, MINUTES).filter(lambda hours: hours.begin != hours.end)
YEAR = (datetime(2026, 1, 1, tzinfo=UTC).timestamp(), datetime(2027, 1, 1, tzinfo=UTC).timestamp())
MOMENTS = st.integers(int(YEAR[0]), int(YEAR[1])).map(float)


@given(HOURS)
def test_hours_read_back_as_they_were_written(hours: DailyHours) -> None:
    assert parse_hours(str(hours)) == hours


@given(HOURS, ZONES, MOMENTS)
def test_nothing_changes_before_the_next_change(hours: DailyHours, zone: WallClock, now_s: float) -> None:
    is_open, change_s = hours.is_open_at(now_s, zone), hours.next_change_s(now_s, zone)
    assert change_s is not None
    for step in range(60):
        assert hours.is_open_at(now_s + (change_s - now_s) * step / 60, zone) == is_open
    assert hours.is_open_at(change_s - 1, zone) == is_open
    assert hours.is_open_at(change_s, zone) != is_open


@given(HOURS, ZONES, MOMENTS)
def test_hours_and_their_opposite_are_never_open_together_nor_both_closed(
    hours: DailyHours, zone: WallClock, now_s: float
) -> None:
    rest = DailyHours(hours.end, hours.begin)
    assert hours.is_open_at(now_s, zone) != rest.is_open_at(now_s, zone)
