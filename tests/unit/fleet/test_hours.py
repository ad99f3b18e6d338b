"""Hours of every day as they are written, read, and kept by clocks that are set forward and back."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from dynaplan.fleet.holds import parse_hours
from dynaplan.util.durations import wall_clock

BERLIN = wall_clock("Europe/Berlin")
"""Set forward on 2026-03-29 from 02:00 to 03:00, back on 2026-10-25 from 03:00 to 02:00."""


def at(text: str) -> float:
    """A moment of Berlin's clock; ``*`` is the second of two equal hours."""
    local = datetime.fromisoformat(text.rstrip("*")).replace(
        tzinfo=ZoneInfo("Europe/Berlin"), fold=text.endswith("*")
    )
    return local.timestamp()


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("9:00-17:00", "09:00-17:00"),
        (" 00:00-24:00 ", "00:00-24:00"),
        ("22:00-06:00", "22:00-06:00"),
    ],
)
def test_hours_are_written_in_one_form_that_reads_back_to_the_same(text: str, same: str) -> None:
    assert str(parse_hours(text)) == same
    assert parse_hours(same) == parse_hours(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nine to five", "expected hours of every day"),
        ("09:00-17:00 mon-fri", "expected hours of every day"),
        ("09:00-12:00; 13:00-17:00", "expected hours of every day"),
        ("09:60-17:00", "no time of a day"),
        ("09:00-25:00", "no time of a day"),
        ("09:00-09:00", "begins and ends at once"),
        ("24:00-06:00", "begins at 00:00 of the next day"),
    ],
)
def test_what_are_no_hours_is_refused_with_what_was_expected(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_hours(text)


def test_they_are_open_from_the_first_minute_until_before_the_last() -> None:
    office = parse_hours("09:00-17:00")
    times = ("08:59", "09:00", "16:59", "17:00")
    is_open = [office.is_open_at(at(f"2026-11-23T{time}"), BERLIN) for time in times]
    assert is_open == [False, True, True, False]


def test_hours_past_midnight_go_on_in_the_morning() -> None:
    night = parse_hours("22:00-06:00")
    times = ("21:59", "22:00", "05:59", "06:00")
    is_open = [night.is_open_at(at(f"2026-11-27T{time}"), BERLIN) for time in times]
    assert is_open == [False, True, True, False]


def test_they_say_when_they_open_and_close() -> None:
    office = parse_hours("09:07-17:00")
    opens_s = office.next_change_s(at("2026-11-21T18:00"), BERLIN)
    assert opens_s == at("2026-11-22T09:07")
    assert office.next_change_s(opens_s, BERLIN) == at("2026-11-22T17:00")


def test_hours_that_are_always_open_never_change() -> None:
    assert parse_hours("00:00-24:00").next_change_s(0.0, BERLIN) is None


def test_when_the_clock_is_set_forward_what_is_skipped_does_not_happen() -> None:
    skipped, across = parse_hours("02:15-02:45"), parse_hours("01:30-02:30")
    eve = at("2026-03-28T12:00")
    assert skipped.next_change_s(eve, BERLIN) == at("2026-03-30T02:15")
    assert across.next_change_s(eve, BERLIN) == at("2026-03-29T01:30")
    assert across.next_change_s(at("2026-03-29T01:45"), BERLIN) == at("2026-03-29T03:00")
    night = parse_hours("01:00-05:00")
    assert at("2026-03-29T05:00") - at("2026-03-29T01:00") == 3 * 3600
    assert night.next_change_s(at("2026-03-29T01:00"), BERLIN) == at("2026-03-29T05:00")


def test_when_the_clock_is_set_back_an_hour_that_comes_twice_is_open_twice() -> None:
    twice = parse_hours("02:15-02:45")
    moments, now_s = [], at("2026-10-24T12:00")
    for _ in range(4):
        change_s = twice.next_change_s(now_s, BERLIN)
        assert change_s
        moments.append(change_s)
        now_s = change_s
    assert moments == [
        at("2026-10-25T02:15"),
        at("2026-10-25T02:45"),
        at("2026-10-25T02:15*"),
        at("2026-10-25T02:45*"),
    ]
