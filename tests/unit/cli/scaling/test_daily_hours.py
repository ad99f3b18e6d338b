"""``dynaplan scale --at``: holds for hours of every day."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.cli.scaling.asking import AskedCount, AskedHold, settled
from dynaplan.cli.scaling.holding import asked_hold, described, now_and_next
from dynaplan.fleet.holds import Hold, RoleHolds
from dynaplan.fleet.store_keys import DesiredCounts
from dynaplan.graph.lifecycle import Role
from dynaplan.util.errors import ConfigError

NOON_S = 1795435200.0  # Monday 2026-11-23, 12:00 UTC
OFFICE = Hold(3, 3, by="alice", at="09:00-17:00", zone="UTC")


def test_the_hours_are_those_of_the_local_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    hold = asked_hold(False, None, None, None, "9:00-17:00")
    assert hold
    assert (hold.made.at, hold.made.zone) == ("09:00-17:00", "UTC")


def test_hours_and_zones_that_nobody_knows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--at 'nine': 'nine': expected hours of every day"):
        asked_hold(False, None, None, None, "nine")
    monkeypatch.setenv("TZ", "Mars/Olympus")
    with pytest.raises(ConfigError, match="'Mars/Olympus' is not known here"):
        asked_hold(False, None, None, None, "09:00-17:00")


MADE = Hold(at="09:00-17:00", zone="UTC")


@pytest.mark.parametrize(
    ("asked", "hold", "held"),
    [
        (AskedCount(Role.DECODE, 3), AskedHold(MADE), Hold(3, 3, at="09:00-17:00", zone="UTC")),
        (AskedCount(Role.DECODE), AskedHold(MADE, at_least=2), Hold(2, None, at="09:00-17:00", zone="UTC")),
    ],
)
def test_a_number_or_bounds_are_held_and_nothing_is_asked_for_now(
    asked: AskedCount, hold: AskedHold, held: Hold
) -> None:
    assert settled([asked], hold, DesiredCounts(), RoleHolds()) == ({}, RoleHolds(decode=held))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (AskedCount(Role.DECODE, more=1), "means nothing at other hours"),
        (AskedCount(Role.DECODE, 3), "outside of 4 or more"),
    ],
)
def test_more_than_now_and_a_number_out_of_its_bounds_are_refused(asked: AskedCount, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settled([asked], AskedHold(MADE, at_least=4), DesiredCounts(), RoleHolds())


def test_outside_of_its_hours_a_hold_refuses_no_number() -> None:
    five, all_day = [AskedCount(Role.DECODE, 5)], Hold(3, 3, at="00:00-24:00", zone="UTC")
    with pytest.raises(ConfigError, match="decode is held at 3 at 00:00-24:00"):
        settled(five, None, DesiredCounts(), RoleHolds(decode=all_day))
    never = RoleHolds(decode=replace(all_day, zone="Mars/Olympus"))
    assert settled(five, None, DesiredCounts(), never) == ({Role.DECODE: 5}, never)


def test_a_hold_says_its_hours_and_when_they_change() -> None:
    said = described(Role.DECODE, OFFICE, NOON_S)
    assert said.startswith("decode is held at 3 by alice (uid 0")
    assert said.endswith("at 09:00-17:00 (UTC): open now, until Mon 2026-11-23 17:00 +0000")
    assert now_and_next(OFFICE, NOON_S + 86400 / 2) == "next from Tue 2026-11-24 09:00 +0000"
    assert now_and_next(Hold(at="00:00-24:00", zone="UTC"), NOON_S) == "always open"
    assert now_and_next(Hold(at="00:00-24:00", zone="Mars"), NOON_S).startswith("never: the time zone 'Mars'")
