"""``dynaplan scale --at``: holds for hours of the week."""

from __future__ import annotations

import pytest

from dynaplan.cli.scaling.asking import AskedCount, AskedHold
from dynaplan.cli.scaling.held_hours import held_by_hours, hold_by_hours
from dynaplan.cli.scaling.holding import asked_hold, described, now_and_next
from dynaplan.fleet.holds import Hold
from dynaplan.graph.lifecycle import Role
from dynaplan.util.errors import ConfigError

NOON_S = 1795435200.0  # Monday 2026-11-23, 12:00 UTC
OFFICE = Hold(3, 3, by="alice", at="09:00-17:00 mon-fri", zone="UTC")


def test_the_hours_are_those_of_the_local_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    hold = asked_hold(False, None, None, None, "9:00-17:00 MON-FRI")
    assert hold
    assert (hold.made.at, hold.made.zone) == ("09:00-17:00 mon-fri", "UTC")


def test_hours_and_zones_that_nobody_knows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--at 'nine': 'nine': expected hours and days"):
        asked_hold(False, None, None, None, "nine")
    monkeypatch.setenv("TZ", "Mars/Olympus")
    with pytest.raises(ConfigError, match="'Mars/Olympus' is not known here"):
        asked_hold(False, None, None, None, "09:00-17:00")


def test_a_number_or_bounds_are_held_and_more_than_now_is_refused() -> None:
    made = Hold(at="09:00-17:00", zone="UTC")
    assert held_by_hours([AskedCount(Role.DECODE, 3)], AskedHold(made))[Role.DECODE].is_exact
    assert held_by_hours([AskedCount(Role.DECODE)], AskedHold(made, at_least=2))[Role.DECODE].at_least == 2
    with pytest.raises(ConfigError, match="means nothing at other hours"):
        held_by_hours([AskedCount(Role.DECODE, more=1)], AskedHold(made))
    with pytest.raises(ConfigError, match="outside of 4 or more"):
        held_by_hours([AskedCount(Role.DECODE, 3)], AskedHold(made, at_least=4))


async def test_without_a_planner_nobody_would_keep_hours() -> None:
    with pytest.raises(ConfigError, match="no planner"):
        await hold_by_hours(None, [AskedCount(Role.DECODE, 3)], AskedHold(OFFICE), is_confirmed=False)


def test_a_hold_says_its_hours_and_when_they_change() -> None:
    said = described(Role.DECODE, OFFICE, NOON_S)
    assert said.startswith("decode is held at 3 by alice (uid 0")
    assert said.endswith("at 09:00-17:00 mon-fri (UTC): open now, until Mon 2026-11-23 17:00 +0000")
    assert now_and_next(OFFICE, NOON_S + 86400 / 2) == "next from Tue 2026-11-24 09:00 +0000"
    assert now_and_next(Hold(at="00:00-24:00", zone="UTC"), NOON_S) == "always open"
    assert now_and_next(Hold(at="00:00-24:00", zone="Mars"), NOON_S).startswith("never: the time zone 'Mars'")
