"""Holds for hours of the week, beside the holds of now."""

from __future__ import annotations

import pytest

from dynaplan.fleet.held_hours import MOST_OF_A_ROLE, HeldHours
from dynaplan.fleet.holds import Hold, RoleHolds
from dynaplan.graph.lifecycle import Role
from dynaplan.util.durations import wall_clock

MONDAY_NOON_S = 1795435200.0
DAY = Hold(3, 3, by="alice", at="09:00-17:00 mon-fri", zone="UTC")
NIGHT = Hold(1, 1, at="22:00-06:00", zone="UTC")


def hours(*holds: Hold) -> HeldHours:
    found = HeldHours()
    for hold in holds:
        found = found.with_hold(Role.DECODE, hold)
    return found


def test_held_hours_read_back_as_they_were_written() -> None:
    both = hours(DAY, NIGHT).with_hold(Role.PREFILL, DAY)
    assert HeldHours.from_text(both.to_text()) == both
    assert HeldHours.from_text("") == HeldHours.from_text("{}") == HeldHours()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"decode": 7}', "expected a list of holds"),
        ('{"decode": [7]}', "expected a list of holds"),
        ('{"decode": [{"at_least": 1}]}', "without hours"),
        ('{"decode": [{"at": "always"}]}', "expected hours and days"),
        ("[]", "expected a JSON object"),
    ],
)
def test_what_are_no_hours_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        HeldHours.from_text(text)


def test_they_are_in_force_while_they_are_open_and_under_a_hold_of_now() -> None:
    found = hours(DAY, NIGHT)
    assert found.under(RoleHolds(), MONDAY_NOON_S, wall_clock) == RoleHolds(decode=DAY)
    assert found.under(RoleHolds(), MONDAY_NOON_S + 11 * 3600, wall_clock) == RoleHolds(decode=NIGHT)
    assert found.under(RoleHolds(), MONDAY_NOON_S + 6 * 3600, wall_clock) == RoleHolds()
    now = RoleHolds(decode=Hold(7, 7))
    assert found.under(now, MONDAY_NOON_S, wall_clock) == now


def test_of_several_that_are_open_the_last_one_counts_and_equal_hours_replace_each_other() -> None:
    more = Hold(5, 5, at="00:00-24:00", zone="UTC")
    assert hours(DAY, more).under(RoleHolds(), MONDAY_NOON_S, wall_clock).decode == more
    again = Hold(4, 4, at=DAY.at, zone="UTC")
    assert hours(DAY, again).by_role[Role.DECODE] == (again,)


def test_in_a_zone_that_nobody_knows_they_are_never_open() -> None:
    lost = Hold(5, 5, at="00:00-24:00", zone="Mars/Olympus")
    assert hours(lost).under(RoleHolds(), MONDAY_NOON_S, wall_clock) == RoleHolds()


def test_they_end_at_their_deadline_open_or_not() -> None:
    ending = Hold(2, 2, until_s=MONDAY_NOON_S, until="noon", at="09:00-17:00", zone="UTC")
    found = hours(DAY, ending)
    assert found.lasting(MONDAY_NOON_S - 1) == found
    assert found.lasting(MONDAY_NOON_S) == hours(DAY)
    assert hours(ending).lasting(MONDAY_NOON_S) == HeldHours()
    assert list(found.sentences) == [
        "decode was held at 3 by alice at 09:00-17:00 mon-fri (UTC)",
        "decode was held at 2 at 09:00-17:00 (UTC) until noon",
    ]


def test_a_role_is_released_without_the_other_and_has_a_bounded_number() -> None:
    both = hours(DAY).with_hold(Role.PREFILL, NIGHT)
    assert both.without(Role.DECODE) == HeldHours({Role.PREFILL: (NIGHT,)})
    many = [Hold(1, at=f"00:00-{1 + number // 60:02}:{number % 60:02}", zone="UTC") for number in range(60)]
    assert len(hours(*many).by_role[Role.DECODE]) == MOST_OF_A_ROLE
