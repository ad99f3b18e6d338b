"""Hours of the week in any zone, at any change of its clock."""

from __future__ import annotations

from datetime import UTC, datetime

import hypothesis.strategies as st
from hypothesis import given

from dynaplan.fleet.hours import Hours, HoursWindow, WallClock, parse_hours
from dynaplan.util.durations import wall_clock

ZONES = st.sampled_from(
    ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"]
).map(wall_clock)
MINUTES = st.integers(0, 24 * 60 - 1)
DAYS = st.frozensets(st.integers(0, 6), min_size=1)
WINDOWS = st.builds(HoursWindow, MINUTES, MINUTES, DAYS).filter(lambda window: window.begin != window.end)
HOURS = st.lists(WINDOWS, min_size=1, max_size=3).map(lambda windows: Hours(tuple(windows)))
YEAR = (datetime(2026, 1, 1, tzinfo=UTC).timestamp(), datetime(2027, 1, 1, tzinfo=UTC).timestamp())
MOMENTS = st.integers(int(YEAR[0]), int(YEAR[1])).map(float)


@given(HOURS)
def test_hours_read_back_as_they_were_written(hours: Hours) -> None:
    assert parse_hours(str(hours)) == hours


@given(HOURS, ZONES, MOMENTS)
def test_nothing_changes_before_the_next_change(hours: Hours, zone: WallClock, now_s: float) -> None:
    is_open, change_s = hours.is_open_at(now_s, zone), hours.next_change_s(now_s, zone)
    until_s = now_s + 8 * 86400 if change_s is None else change_s
    for step in range(60):
        assert hours.is_open_at(now_s + (until_s - now_s) * step / 60, zone) == is_open
    if change_s is not None:
        assert hours.is_open_at(change_s - 1, zone) == is_open
        assert hours.is_open_at(change_s, zone) != is_open


@given(WINDOWS, ZONES, MOMENTS)
def test_a_window_and_its_opposite_are_never_open_together_nor_both_closed(
    window: HoursWindow, zone: WallClock, now_s: float
) -> None:
    every = frozenset(range(7))
    open_ = Hours((HoursWindow(window.begin, window.end, every),))
    rest = Hours((HoursWindow(window.end, window.begin, every),))
    assert open_.is_open_at(now_s, zone) != rest.is_open_at(now_s, zone)
